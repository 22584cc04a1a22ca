"""Intervals: the contiguous range of key rows that each query row sees, as two int32 tensors.

``start``, ``end``: (Sq,), half-open local key rows, both non-decreasing. A row without keys has
``start == end``. They are made from global positions: ``visible_range`` turns a mask into a range
of positions, ``intervals`` turns that into rows of the present keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_range(
    positions: Tensor,
    seq_len: int,
    *,
    causal: bool,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the global positions ``[low, high)`` that queries at ``positions`` see; int64.

    ``cu_seqlens``: document boundaries (0, ..., seq_len), int64, or None. Positions at or beyond
    ``seq_len`` are padding and see ``[seq_len, seq_len)``.
    """
    low = torch.zeros_like(positions)
    high = torch.full_like(positions, seq_len)
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens, positions, right=True)
        document = document.clamp_(max=len(cu_seqlens) - 1)
        low, high = cu_seqlens[document - 1], cu_seqlens[document]
    if causal:
        high = torch.minimum(high, positions + 1)
    if window is not None:
        low = torch.maximum(low, positions - window)
    padding = positions >= seq_len
    return low.masked_fill(padding, seq_len), high.masked_fill(padding, seq_len)


def intervals(low: Tensor, high: Tensor, key_positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows of ``key_positions`` (int64, strictly increasing) in ``[low, high)``."""
    start = torch.searchsorted(key_positions, low, out_int32=True)
    end = torch.searchsorted(key_positions, high, out_int32=True)
    return start, end


def inverse(start: Tensor, end: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Returns the query rows that see each key row, as a half-open range; int32 (num_keys,).

    Bounds never decrease, so the rows with ``start_i <= j`` are a head of all rows and those with
    ``end_i > j`` a tail. A key that no query sees has ``first >= stop``.
    """
    keys = torch.arange(num_keys, dtype=start.dtype, device=start.device)
    first = torch.searchsorted(end.contiguous(), keys, right=True, out_int32=True)
    stop = torch.searchsorted(start.contiguous(), keys, right=True, out_int32=True)
    return first, stop
