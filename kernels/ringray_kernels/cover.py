"""Covers of intervals by dense calls, for fused attention with a full, causal or explicit mask.

The visible pairs of all rows are divided into calls over a block of query rows and a range of key
rows: each pair lies in exactly one call, and every row of a call sees at least one key in it (fused
kernels disagree about rows without keys).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    Ints = NDArray[np.int64]

MIN_RUN = 64  # rows; a shorter regular run is not worth its own call
DEFAULT_BLOCK = 256  # query rows per masked call


class DenseCall(NamedTuple):
    """Query rows ``[row, row_stop)`` against key rows ``[key, key_stop)``.

    ``full``: every row sees every key. ``causal``: square, row i sees keys up to its own index.
    ``masked``: the intervals decide. ``first``: no earlier call has these rows.
    """

    row: int
    row_stop: int
    key: int
    key_stop: int
    mode: Literal["full", "causal", "masked"]
    first: bool


def cover(start: Tensor, end: Tensor, block: int | None = None) -> list[DenseCall]:
    """Returns dense calls for the intervals of one batch entry, ``start``, ``end`` int32 (Sq,)."""
    s, e = start.cpu().numpy().astype(np.int64), end.cpu().numpy().astype(np.int64)
    return list(_cover(s, e, block or DEFAULT_BLOCK))


def _run_stops(s: Ints, e: Ints) -> tuple[Ints, Ints]:
    """Returns per row i the step pattern from i to i+1 and the last row of that pattern.

    Patterns: 0 same interval, 1 one more key at the end, 2 other steps, 3 a row without keys.
    """
    ds, de = np.diff(s), np.diff(e)
    pattern = np.where(ds == 0, np.where(de == 0, 0, np.where(de == 1, 1, 2)), 2)
    empty = e <= s
    pattern = np.append(np.where(empty[:-1] | empty[1:], 3, pattern), 3)
    change = np.append(np.flatnonzero(np.diff(pattern)), len(pattern) - 1)
    last = change[np.searchsorted(change, np.arange(len(pattern)))] + 1
    return pattern, np.minimum(last, len(pattern) - 1)


def _cover(s: Ints, e: Ints, block: int) -> Iterator[DenseCall]:
    pattern, last = _run_stops(s, e)
    rows = len(s)
    row = 0
    irregular = 0  # first row not yet covered
    while row < rows:
        if e[row] <= s[row]:
            yield from _masked(s, e, irregular, row, block)
            # rows without keys come in runs: find the next row with one
            ahead = np.flatnonzero(e[row:] > s[row:])
            row = irregular = row + int(ahead[0]) if len(ahead) else rows
        elif pattern[row] in (0, 1) and last[row] + 1 - row >= MIN_RUN:
            yield from _masked(s, e, irregular, row, block)
            stop = int(last[row]) + 1
            yield from _regular(s, e, row, stop, bool(pattern[row]))
            row = irregular = stop
        else:
            row = max(row + 1, int(last[row])) if pattern[row] != 3 else row + 1
    yield from _masked(s, e, irregular, rows, block)


def _regular(s: Ints, e: Ints, row: int, stop: int, rising: bool) -> Iterator[DenseCall]:
    """Covers rows with one start, and one end or an end that rises by one."""
    low, high = int(s[row]), int(e[row])
    if not rising:
        yield DenseCall(row, stop, low, high, "full", True)
        return
    if low < high - 1:
        yield DenseCall(row, stop, low, high - 1, "full", True)
    yield DenseCall(row, stop, high - 1, int(e[stop - 1]), "causal", low == high - 1)


def _masked(s: Ints, e: Ints, row: int, stop: int, block: int) -> Iterator[DenseCall]:
    """Covers any rows with keys: keys that all rows see need no mask; the rest is halved until a
    mask of at most ``block`` rows is small."""
    if row < stop:
        yield from _halve(s[row:stop], e[row:stop], row, block, True)


def _halve(s: Ints, e: Ints, row: int, block: int, first: bool) -> Iterator[DenseCall]:
    stop = row + len(s)
    low, low_all, high_all, high = int(s[0]), int(s[-1]), int(e[0]), int(e[-1])
    if low == low_all and high == high_all:
        yield DenseCall(row, stop, low, high, "full", first)
        return
    # Edges overlap the common keys by one, so that each row sees a key in each call.
    inner = (low_all + 1 if low < low_all else low, high_all - 1 if high_all < high else high)
    if inner[1] - inner[0] >= block:
        yield DenseCall(row, stop, *inner, "full", first)
        first = False
        edges = [(s, np.minimum(e, inner[0]))] if low < inner[0] else []
        edges += [(np.maximum(s, inner[1]), e)] if inner[1] < high else []
    else:
        edges = [(s, e)]
    half = len(s) // 2
    for starts, ends in edges:
        if len(s) <= block:
            yield DenseCall(row, stop, int(starts[0]), int(ends[-1]), "masked", first)
        else:
            yield from _halve(starts[:half], ends[:half], row, block, first)
            yield from _halve(starts[half:], ends[half:], row + half, block, first)
