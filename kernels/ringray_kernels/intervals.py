"""Intervals: the contiguous range of key rows that each query row sees, as two int32 tensors.

``start``, ``end``: (Sq,), half-open local key rows, both non-decreasing. A row without keys has
``start == end``. They are made from global positions: ``visible_ranges`` turns a mask into ranges
of positions, ``intervals`` turns these into rows of the present keys. What a backend derives from
them (``derived``) is kept with them, so callers that pass the same tensors again pay for it once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ringray_kernels.modes import lasting

T = TypeVar("T")


class Positions(NamedTuple):
    """Global positions of query rows, int32 (Sq,), and of key rows, int32 (Sk,)."""

    rows: Tensor
    keys: Tensor


def visible_range(
    positions: Tensor,
    seq_len: int,
    *,
    causal: bool,
    window: int | tuple[int | None, int | None] | None = None,
    cu_seqlens: Tensor | None = None,
    chunk: int | None = None,
    prefix: int | Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the global positions ``[low, high)`` that queries at ``positions`` see; int64.

    ``window``: keys before a query, or (keys before, keys after) it; None is all of them.
    ``cu_seqlens``: document boundaries (0, ..., seq_len), int64, or None. ``chunk``: a query sees
    its own of the chunks of this length from the beginning of its document. ``prefix``: the first
    positions of each document (one number for all, or one for each) see just each other, whatever
    the rest says. Positions at or beyond ``seq_len`` are padding and see ``[seq_len, seq_len)``.
    """
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, seq_len], dtype=torch.int64, device=positions.device)
    # Padding lies behind the last document; it counts as part of it up to the last line.
    document = torch.searchsorted(cu_seqlens, positions, right=True)
    document = document.clamp_(max=len(cu_seqlens) - 1)
    begin, end = cu_seqlens[document - 1], cu_seqlens[document]
    low, high = begin, end
    if chunk is not None:
        low = positions - (positions - begin) % chunk
        high = torch.minimum(high, low + chunk)
    left, right = window if isinstance(window, tuple) else (window, None)
    if causal:
        high = torch.minimum(high, positions + 1)
    if right is not None:
        high = torch.minimum(high, positions + right + 1)
    if left is not None:
        low = torch.maximum(low, positions - left)
    if prefix is not None:
        lengths = torch.as_tensor(prefix, dtype=torch.int64, device=positions.device)
        lengths = lengths.expand(len(cu_seqlens) - 1)
        stop = torch.minimum(begin + lengths[document - 1], end)
        inside = positions < stop
        low, high = torch.where(inside, begin, low), torch.where(inside, stop, high)
    padding = positions >= seq_len
    return low.masked_fill(padding, seq_len), high.masked_fill(padding, seq_len)


def visible_ranges(
    positions: Tensor,
    seq_len: int,
    *,
    causal: bool,
    cu_seqlens: Tensor | None = None,
    global_tokens: int | None = None,
    shared_prefix: int | None = None,
    **mask: Any,
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Returns ranges ``[low, high)`` without a common position, which together are what queries at
    ``positions`` see: that of ``visible_range``, unless there are ``global_tokens``, the first
    positions of each document, which queries see beside it, and which see all of it if not
    ``causal``, or a ``shared_prefix``, the first positions of all, which queries see beside it.

    The first range has these positions, the second what else a query sees, so both never
    decrease. What global tokens see beyond themselves, to the document's end, is a third: the
    second's ends would decrease after it.
    """
    low, high = visible_range(positions, seq_len, causal=causal, cu_seqlens=cu_seqlens, **mask)
    tokens = global_tokens if shared_prefix is None else shared_prefix
    if tokens is None:
        return ((low, high),)
    # A shared prefix is one of the whole sequence, global tokens are those of each document.
    sections = cu_seqlens if shared_prefix is None else None
    begin, end = visible_range(positions, seq_len, causal=causal, cu_seqlens=sections)
    stop = torch.minimum(begin + tokens, end)
    # What a query sees beside these positions, so that no pair is counted twice.
    low, high = torch.maximum(low, stop), torch.maximum(high, stop)
    if causal or shared_prefix is not None:
        return (begin, stop), (low, high)
    is_token = positions < stop
    return (begin, stop), (low, high.where(~is_token, stop)), (stop.where(is_token, end), end)


def within_documents(positions: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns ``positions`` (S,) from 0 in each document; (B, S) if batch rows have boundaries of
    their own (B, n)."""
    cu_seqlens = cu_seqlens.to(positions)
    positions = positions.expand(*cu_seqlens.shape[:-1], -1).contiguous()
    own = torch.searchsorted(cu_seqlens, positions, right=True) - 1
    return positions - cu_seqlens.gather(-1, own)


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


class _Cache:
    """Values derived from one pair of bounds, kept on its tensor of starts; invalid after a change
    of either in place, and empty in a copy."""

    def __init__(self, end: Tensor | None = None, versions: tuple[int, int] | None = None) -> None:
        self.end = None if end is None else weakref.ref(end)
        self.versions = versions
        self.values: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _Cache, ()


def derived(start: Tensor, end: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """Returns ``make()``, a function of the two tensors and ``key``, which is kept with ``start``
    until one of them changes. It must not hold views of them."""
    if start.is_inference() or end.is_inference():  # which do not count their changes
        return make()
    versions = start._version, end._version
    cache = getattr(start, "_ringray_cache", None)
    # A change in place counts a version up; another tensor of ends makes another pair.
    if cache is None or cache.versions != versions or cache.end() is not end:
        cache = start._ringray_cache = _Cache(end, versions)  # type: ignore[attr-defined]
    if key not in cache.values:
        if capturing(start.device):  # its memory would be the graph's
            return make()
        with lasting(start.device):
            cache.values[key] = make()
    return cast("T", cache.values[key])


def capturing(device: torch.device) -> bool:
    """Returns whether the work of this thread on ``device`` is captured for a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
