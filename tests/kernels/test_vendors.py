"""Backends of vendors' kernels: what reaches the kernels, and what comes back, without a GPU.

In place of the kernels stand plain functions with their signatures and shapes. On a GPU
``test_gpu.py`` runs the kernels themselves.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringray.lab.plan.pruning import unfit
from ringray_kernels import State, forward, testing
from ringray_kernels.api import BackwardOperands, Features, Operands, load_backend
from ringray_kernels.backends import GPU_ONLY, cudnn, flash
from ringray_kernels.intervals import intervals, visible_range
from tests.support.point import point

ROWS, HEADS, KV_HEADS, DIM = 150, 4, 2, 16
SCALE = DIM**-0.5
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window": 90},
    "documents": {"causal": True, "cu_seqlens": torch.tensor([0, 70, 70, 150])},
}


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns out, lse and weights of (B, H, S, D) with shared heads."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    scores = q.double() @ k.mT * scale
    if causal:
        assert q.shape[2] == k.shape[2], "every vendor means the same mask only by a square"
        scores.masked_fill_(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ v).to(q.dtype), lse.float(), scores


def differentiate(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float,
) -> list[Tensor]:  # fmt: skip
    """Returns dq, dk, dv, shaped as given, from the global lse and output."""
    _, _, scores = attend(q, k, v, causal, scale)
    weights = (scores - lse.double()[..., None]).exp()
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).double() for x in (k, v))
    delta = (dout.double() * out.double()).sum(-1, keepdim=True)
    ds = weights * (dout.double() @ wide_v.mT - delta) * scale
    shared = [ds.mT @ q.double(), weights.mT @ dout.double()]
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in shared)
    return [x.to(q.dtype) for x in (ds @ wide_k, dk, dv)]


class Cudnn(SimpleNamespace):
    """PyTorch's operators of cuDNN."""

    calls = 0

    def _scaled_dot_product_cudnn_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float,
        causal: bool, debug: bool, *, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
        assert 0 not in k.stride()[:2]
        self.calls += 1
        out, lse, _ = attend(q, k, v, causal, scale)
        return out, lse[..., None], None, None, 0, 0, None, None, None

    def _scaled_dot_product_cudnn_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor,
        offset: Tensor, bias: None, cum_q: None, cum_k: None, max_q: int, max_k: int,
        dropout: float, causal: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (bias, cum_q, cum_k, dropout) == (None, None, None, 0.0)
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        self.calls += 1
        return tuple(differentiate(dout, q, k, v, out, lse[..., 0], causal, scale))


class Flash2(SimpleNamespace):
    """``flash_attn.flash_attn_interface``."""

    calls = 0

    def _flash_attn_forward(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: None,
        return_softmax: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert (window_size_left, window_size_right, softcap) == (-1, -1, 0.0)
        assert (dropout_p, alibi_slopes, return_softmax) == (0.0, None, False)
        self.calls += 1
        out, lse, _ = attend(*(x.transpose(1, 2) for x in (q, k, v)), causal, softmax_scale)
        return out.transpose(1, 2), lse, None, None

    def _flash_attn_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        dq: Tensor, dk: Tensor, dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: None,
        deterministic: bool, rng_state: None = None,
    ) -> Tensor:  # fmt: skip
        assert deterministic
        self.calls += 1
        given = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        found = differentiate(*given, softmax_lse, causal, softmax_scale)
        for into, x in zip((dq, dk, dv), found, strict=True):
            into.copy_(x.transpose(1, 2))
        return softmax_lse


class Flash3(SimpleNamespace):
    """``flash_attn_interface``, less the arguments that are left at their defaults."""

    calls = 0

    def _flash_attn_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool
    ) -> tuple[Any, ...]:
        self.calls += 1
        out, lse, _ = attend(*(x.transpose(1, 2) for x in (q, k, v)), causal, softmax_scale)
        return out.transpose(1, 2), lse, None, None

    def _flash_attn_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, *,
        dq: Tensor, dk: Tensor, dv: Tensor, softmax_scale: float, is_causal: bool,
        deterministic: bool,
    ) -> Tensor:  # fmt: skip
        assert deterministic
        self.calls += 1
        given = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        found = differentiate(*given, softmax_lse, is_causal, softmax_scale)
        for into, x in zip((dq, dk, dv), found, strict=True):
            into.copy_(x.transpose(1, 2))
        return softmax_lse


@pytest.fixture(params=["cudnn", "flash 2", "flash 3"])
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The backend, and what stands in place of its kernels."""
    if request.param == "cudnn":
        kernels: Any = Cudnn()
        monkeypatch.setattr(cudnn, "_ops", kernels)
        return cudnn, kernels
    kernels = Flash3() if request.param == "flash 3" else Flash2()
    calls = flash.Kernels(kernels, version_3=request.param == "flash 3")
    monkeypatch.setattr(flash, "_kernels", lambda q: calls)
    return flash, kernels


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("value_dim", [DIM, 8])
def test_two_hops_are_within_the_budget(vendor: Any, mask: str, value_dim: int) -> None:
    backend, kernels = vendor
    q, k, v, dout = testing.make_inputs(
        1, HEADS, KV_HEADS, ROWS, DIM, torch.bfloat16, value_dim=value_dim, seed=0
    )
    low, high = visible_range(torch.arange(ROWS), ROWS, **MASKS[mask])
    state: State | None = None
    hops = []
    for keys in (torch.arange(0, 64), torch.arange(64, ROWS)):
        start, end = (x[None] for x in intervals(low, high, keys))
        hops.append((keys, Operands(q, k[:, :, keys], v[:, :, keys], start, end, SCALE, None)))
        dtype = q.dtype if len(hops) == 2 else torch.float32
        state = backend.forward(hops[-1][1], state, dtype)
    assert state is not None
    assert kernels.calls > 0
    delta = backend.delta(dout, state.out, state.lse)
    dq = torch.zeros(q.shape)
    dk, dv = torch.zeros(k.shape), torch.zeros(v.shape)
    kernels.calls = 0
    for keys, operands in hops:
        part_k, part_v = torch.zeros(operands.k.shape), torch.zeros(operands.v.shape)
        given = BackwardOperands(dout, state.out, state.lse, delta, dq, part_k, part_v)
        backend.backward(operands, given)
        dk[:, :, keys] += part_k
        dv[:, :, keys] += part_v
    assert kernels.calls > 0
    seen = testing.visible(ROWS, **MASKS[mask])
    want = testing.oracle(q, k, v, dout, seen, scale=SCALE)
    yard = testing.yardstick(q, k, v, dout, seen, scale=SCALE, causal=MASKS[mask]["causal"])
    found = {"out": state.out, "dq": dq, "dk": dk, "dv": dv}
    for name, got in found.items():
        share = testing.budget_share(
            got.to(q.dtype), getattr(want, name), getattr(yard, name), dout
        )
        assert share <= 1, (name, share)


def test_arguments_fit_the_operators_of_this_pytorch() -> None:
    """By their shapes alone: the operators know tensors without content."""
    q = torch.empty(2, 4, 24, DIM, dtype=torch.bfloat16, device="meta")
    k = q[:, :1, :16].expand(-1, 4, -1, -1)
    calls = cudnn._Kernels()
    out, lse = calls.forward(q, k, k, causal=False, scale=SCALE)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    grads = calls.backward(q, q, k, k, out, lse, causal=False, scale=SCALE)
    assert [tuple(x.shape) for x in grads] == [(2, 4, 24, DIM), *[(2, 1, 16, DIM)] * 2]


@pytest.mark.parametrize("name", GPU_ONLY)
def test_refusals(name: str) -> None:
    q = torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16)
    bounds = torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"backend '{name}': got tensors on cpu.*; .*aten.* can"):
        forward(q, q, q, bounds, bounds + 8, scale=1.0, backend=name)
    assert "on cpu" in (load_backend(name).unsupported(q) or "")
    config = point(backend=name, dtype="bfloat16")
    assert "runs on GPUs only" in str(unfit(config, "cpu"))
    assert unfit(config, "cuda") is None


@pytest.mark.parametrize(
    ("changed", "asked", "says"),
    [
        ({"dtype": torch.float32}, Features(), "got torch.float32, expected bfloat16 or float16"),
        ({}, Features(softcap=3.0), "got softcap 3.0"),
        ({"dim": 192}, Features(), "got head dim 192, expected a multiple of 8 up to 128"),
        ({"dim": 20}, Features(), "got head dim 20"),
        ({}, Features(value_dim=136), "got head dim 136"),
        ({"dim": 128}, Features(value_dim=64), None),
    ],
)
def test_limits(changed: dict[str, Any], asked: Features, says: str | None) -> None:
    q = torch.zeros(1, 1, 8, changed.get("dim", 16), dtype=changed.get("dtype", torch.float16))
    found = cudnn.limits(q, asked)
    assert found is None if says is None else says in (found or "")
