"""Checks of tensors and numbers, which say what was given and what is expected.

Shape legend: B batch, H heads, S rows, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from ringray_kernels import dtypes

DTYPES = tuple(map(dtypes.torch_dtype, dtypes.DTYPES))
MAX_HEAD_DIM = 512
LARGEST_SCALE = torch.finfo(torch.float32).max
LEAST_SOFTCAP = 1e-30  # what divides by it stays far from the end of fp32


class TensorKind(Protocol):
    """All that a check of what can be computed reads of a tensor."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def expect(
    name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises ValueError unless ``tensor`` is of that shape and dtype, on ``device``."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: got {tensor.dtype}, expected {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {device}")


def not_plain(x: Tensor) -> str | None:
    """Returns what ``x`` is instead of a plain, dense tensor, whose elements can be sent, or
    None."""
    dispatches = type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
    waits = hasattr(x, "trigger_wait")  # the result of a collective: plain, but not yet there
    if (dispatches and not waits) or x.is_nested or x.layout != torch.strided or x.is_quantized:
        return (
            f"a {type(x).__name__} of layout {x.layout}, expected a plain, dense tensor "
            "(to_local() of a DTensor, to_dense() of a sparse one)"
        )
    return None


def check_qkv(q: Tensor, k: Tensor, v: Tensor, expected: tuple[torch.dtype, ...] = DTYPES) -> None:
    """Checks shapes, dtypes, devices and head counts of one attention problem.

    Raises:
        ValueError: with the given and the expected value.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: got {type(tensor).__name__}, expected a tensor")
        if reason := not_plain(tensor):
            raise ValueError(f"{name}: got {reason}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected 4 dimensions (B, H, S, D)"
            )
        if tensor.dtype not in expected:
            raise ValueError(
                f"{name}: got {tensor.dtype}, expected one of {', '.join(map(str, expected))}"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name}: got {tensor.dtype} on {tensor.device}, "
                f"expected q's {q.dtype} on {q.device}"
            )
        if 0 in tensor.shape:
            raise ValueError(f"{name}: got an empty tensor of shape {tuple(tensor.shape)}")
    batch, heads, _, head_dim = q.shape
    kv_heads, key_rows = k.shape[1], k.shape[2]
    expect("k", k, (batch, kv_heads, key_rows, head_dim), q.dtype, q.device)
    expect("v", v, (batch, kv_heads, key_rows, v.shape[3]), q.dtype, q.device)
    if heads % kv_heads:
        raise ValueError(
            f"heads: got {heads} query heads and {kv_heads} key/value heads, "
            "expected query heads to be a multiple of key/value heads"
        )
    if (widest := max(head_dim, v.shape[3])) > MAX_HEAD_DIM:
        raise ValueError(f"head dim: got {widest}, expected at most {MAX_HEAD_DIM}")


def unusable_scale(scale: object) -> str | None:
    """Returns why scores, which are fp32, cannot be multiplied by ``scale``, or None."""
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if number and abs(cast("float", scale)) <= LARGEST_SCALE:  # not so for NaN
        return None
    return f"scale: got {scale!r}, expected None or a finite number that fp32 holds"


def unusable_softcap(softcap: object) -> str | None:
    """Returns why scores cannot be capped at ``softcap``, or None."""
    number = isinstance(softcap, int | float) and not isinstance(softcap, bool)
    if softcap is None or (number and LEAST_SOFTCAP <= cast("float", softcap) <= LARGEST_SCALE):
        return None
    return f"softcap: got {softcap!r}, expected None or a finite number of at least {LEAST_SOFTCAP}"
