"""Boundaries of packed documents, as callers give them: lists, arrays or tensors on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringray.base.units import plain
from ringray.traffic.mask import Documents
from ringray_kernels.intervals import derived

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # of ids and labels


def document_boundaries(cu_seqlens: Any, batch: int) -> Documents:
    """Returns ``cu_seqlens`` as a tuple, of tuples if each batch row has its own; ``Mask`` checks
    its values."""
    bounds = boundaries(cu_seqlens)
    if bounds is None:
        return None
    if not isinstance(bounds, Tensor):
        raise ValueError(f"cu_seqlens: got {bounds!r}, expected integers in a tensor or a list")
    by_row = bounds.dim() == 2 and len(bounds) == batch
    if (
        not (by_row or bounds.dim() == 1)
        or bounds.is_floating_point()
        or bounds.dtype is torch.bool
    ):
        raise ValueError(
            f"cu_seqlens: got {bounds.dtype} of shape {tuple(bounds.shape)}, expected a "
            f"1-D tensor of integers, or a 2-D one with a row for each of {batch} batch rows"
        )
    values = on_host(bounds).tolist()
    return tuple(map(tuple, values)) if by_row else tuple(values)


def on_host(x: Tensor) -> Tensor:
    """Returns ``x`` in host memory; one on a device is read once, and again after it has
    changed."""
    return x if x.device.type == "cpu" else derived(x, x, "on host", x.cpu)


def boundaries(cu_seqlens: Any) -> Any:
    """Returns a list, a tuple or an array of integers as a tensor, and anything else as it is. Of
    several rows (lists, tensors, arrays) the shorter ones are filled with their last boundary:
    documents without a token."""
    if cu_seqlens is None or isinstance(cu_seqlens, Tensor):
        return cu_seqlens
    try:
        if hasattr(cu_seqlens, "__array__"):
            return torch.as_tensor(cu_seqlens, device="cpu")
        # Arrays are not read: a compiler may trace this.
        if not any(isinstance(x, list | tuple) or getattr(x, "ndim", 0) for x in cu_seqlens):
            return _integers(cu_seqlens)
        rows = [_integers(row) for row in cu_seqlens]
        most = max(map(len, rows))
        return torch.stack([torch.cat([x, x[-1:].expand(most - len(x))]) for x in rows])
    except (TypeError, ValueError, RuntimeError):  # of torch, too: integers beyond 64 bits
        return cu_seqlens


def _integers(row: Any) -> Tensor:
    if getattr(row, "ndim", 0):
        return torch.as_tensor(row, device="cpu")
    values = [plain(x) for x in row]
    if not all(type(x) is int for x in values):
        raise TypeError
    return torch.tensor(values, dtype=torch.int64, device="cpu")
