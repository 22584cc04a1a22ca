"""Kernels of vendors in plain PyTorch: functions with their signatures, shapes and demands on
memory."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def readable(*tensors: Tensor) -> None:
    """Refuses what kernels misread, or fault on: rows that are not 16-byte aligned."""
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0
        assert not any(stride * x.itemsize % 16 for stride in x.stride()[:-1])
        assert x.data_ptr() % 16 == 0


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, lse and scores of (B, H, S, D) with shared heads."""
    readable(q, k, v)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    scores = q.double() @ k.mT * scale
    if causal:
        assert q.shape[2] == k.shape[2], "every vendor means the same mask only by a square"
        scores.masked_fill_(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    if bias is not None:
        scores += bias
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ v).to(q.dtype), lse.float(), scores


def differentiate(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    bias: Tensor | None = None,
) -> list[Tensor]:
    """Returns dq, dk, dv, shaped as given, from the global lse and output."""
    readable(dout)
    _, _, scores = attend(q, k, v, causal, scale, bias)
    weights = (scores - lse.double()[..., None]).exp()
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    delta = (dout.double() * out.double()).sum(-1, keepdim=True)
    ds = weights * (dout.double() @ wide_v.mT - delta) * scale
    shared = [ds.mT @ q.double(), weights.mT @ dout.double()]
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in shared)
    return [x.to(q.dtype) for x in (ds @ wide_k, dk, dv)]


class Operators:
    """PyTorch's operators of kernels on a GPU, its own and cuDNN's, with the arguments of their
    schemas."""

    calls = 0

    def __getattr__(self, name: str) -> Any:
        kind, backward = name.split("_")[4], name.endswith("backward")
        arguments = getattr(torch.ops.aten, name).default._schema.arguments

        def call(*values: Any, **named: Any) -> tuple[Any, ...]:
            self.calls += 1
            names = (argument.name.removesuffix("_") for argument in arguments)
            inputs = SimpleNamespace(**dict(zip(names, values, strict=False)), **named)
            assert inputs.dropout_p == 0.0
            assert not getattr(inputs, "return_debug_mask", False)
            assert kind != "flash" or inputs.query.dtype != torch.float32
            bias = getattr(inputs, "attn_bias", None)
            if bias is not None:
                assert kind == "efficient"
                self.check_bias(bias, inputs.query, inputs.key)
            asked = (inputs.is_causal, inputs.scale, bias)
            return (self.gradients if backward else self.attention)(kind, inputs, *asked)

        return call

    def attention(self, kind: str, given: Any, *asked: Any) -> tuple[Any, ...]:
        assert getattr(given, "compute_log_sumexp", True)
        out, lse, _ = attend(given.query, given.key, given.value, *asked)
        if kind == "cudnn":
            assert 0 not in given.key.stride()[:2]
            return out, lse[..., None], *[None] * 7
        if kind == "efficient":
            lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse, None, None

    def gradients(self, kind: str, given: Any, *asked: Any) -> tuple[Any, ...]:
        q, k, out, lse = given.query, given.key, given.out, given.logsumexp
        if kind == "efficient":
            assert given.grad_input_mask == [True, True, True, False]
            assert lse.shape[-1] % 32 == 0
            assert not any(stride % 8 for stride in lse.stride()[:2])
            lse = lse[:, :, : q.shape[2]]
            if out.dtype != torch.float32:
                out = self.misread(out)
        else:
            assert given.cum_seq_q is given.cum_seq_k is None, "packed sequences, of 3 dimensions"
            assert (given.max_q, given.max_k) == (q.shape[2], k.shape[2])
            assert kind == "cudnn" or lse.is_contiguous()
        if kind == "cudnn":
            assert max(q.shape[2], k.shape[2]) > 1, "cuDNN's backward refuses one row with one key"
            lse = lse[..., 0]
        grads = differentiate(given.grad_out, q, k, given.value, out, lse, *asked)
        return (*grads, None) if kind == "efficient" else tuple(grads)

    def check_bias(self, bias: Tensor, q: Tensor, k: Tensor) -> None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.dtype == q.dtype
        assert bias.stride(3) == 1
        assert bias.stride(2) % 8 == bias.data_ptr() % 16 == 0

    def misread(self, out: Tensor) -> Tensor:
        """Takes rows of 16 bits for H * D elements apart."""
        _, heads, rows, dim = out.shape
        assert out.data_ptr() % 16 == 0
        reach = out.stride(0) * (len(out) - 1) + out.stride(1) * (heads - 1)
        reach += heads * dim * (rows - 1) + dim + out.storage_offset()
        memory = out.new_empty(0).set_(out.untyped_storage())
        memory = torch.nn.functional.pad(memory, (0, max(0, reach - len(memory))))
        strides = (out.stride(0), out.stride(1), heads * dim, 1)
        return memory.as_strided(out.shape, strides, out.storage_offset())


class Flash:
    """A module of FlashAttention ``version``: ``flash_attn.flash_attn_interface`` of 2,
    ``flash_attn_interface`` of 3, ``flash_attn.cute.interface`` of 4."""

    #: Arguments that version 2 has no defaults for, and others are not given.
    UNUSED = {  # noqa: RUF012
        "dropout_p": 0.0,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }

    def __init__(self, version: int) -> None:
        self.version, self.calls = version, 0

    def attended(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
        self.calls += 1
        out, lse, _ = attend(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
        return out.transpose(1, 2), lse, None, None

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> list[Tensor]:
        self.calls += 1
        assert lse.is_contiguous()
        tensors = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        return [x.transpose(1, 2) for x in differentiate(*tensors, lse, causal, scale)]

    def _flash_attn_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, **rest: Any
    ) -> Any:
        assert self.version in (2, 3)
        assert rest == ({} if self.version == 3 else self.UNUSED | {"return_softmax": False})
        return self.attended(q, k, v, causal, softmax_scale)

    def _flash_attn_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        *,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        softmax_scale: float,
        deterministic: bool,
        **rest: Any,
    ) -> Tensor:
        causal = rest.pop("is_causal" if self.version == 3 else "causal")
        assert deterministic
        assert rest == ({} if self.version == 3 else self.UNUSED)
        gradients = self.gradients(dout, q, k, v, out, softmax_lse, causal, softmax_scale)
        for into, x in zip((dq, dk, dv), gradients, strict=True):
            into.copy_(x)
        return softmax_lse

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        return_lse: bool = False,
    ) -> Any:
        assert self.version == 4
        assert return_lse
        assert softmax_scale is not None
        # Two results until beta 15, four from 27 on.
        return self.attended(q, k, v, causal, softmax_scale)[: 4 if self.calls % 2 else 2]

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        deterministic: bool = False,
    ) -> tuple[Tensor, ...]:
        assert deterministic
        assert softmax_scale is not None
        return tuple(self.gradients(dout, q, k, v, out, lse, causal, softmax_scale))
