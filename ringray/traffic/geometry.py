"""Visible pairs and needed rows of all pairs of ranks, in closed form: no rows are listed.

The ranges of a partition share one step, so "query p sees key k" between two ranges depends only on
the difference of two indices, and the visible pairs and the needed key rows have formulas. FLOPs,
balance and traffic of the planner, and all messages of the ring, follow from them. Imports numpy
only.

Arrays are indexed ``[visiting rank, owner]``: keys travel from their owner to the ranks
whose queries see them, or queries to the ranks whose keys they see; rows are the owner's. Where
they are needed in places far apart, they travel in parts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray import partition as partitions
from ringray.traffic.mask import Mask, areas

Ints = NDArray[np.int64]
Rows32 = NDArray[np.int32]  # a large ring has many pairs of ranks


_ELEMENTS_AT_ONCE = 1 << 20  # bounds the memory of one vectorised step over documents and ranks


@dataclass(frozen=True)
class Layout:
    """The positions of a sequence on the ranks of a ring.

    ``padded``: length that is dealt (tokens). ``ranks``: of the ring. ``fold``: shards per rank: 1,
    or the Ulysses degree where an exchange of heads for rows has joined consecutive shards.
    """

    partition: str
    padded: int
    ranks: int
    fold: int = 1

    @property
    def rows(self) -> int:
        """Returns the rows that each rank of the ring holds."""
        return self.padded // self.ranks

    def ranges(self, rank: int) -> tuple[range, ...]:
        """Returns disjoint ranges of one step; the rank holds the positions of their sorted
        union."""
        if self.ranks == 1:
            return (range(self.padded),)
        rule, world_size = partitions.get(self.partition), self.ranks * self.fold
        if self.fold == 1:
            return rule.ranges(self.padded, world_size, rank)
        shards = range(rank * self.fold, (rank + 1) * self.fold)
        dealt = [one for shard in shards for one in rule.ranges(self.padded, world_size, shard)]
        joined: list[range] = []
        for one in sorted((one for one in dealt if one), key=lambda one: one.start):
            if joined and one.step == 1 and joined[-1].stop == one.start:
                joined[-1] = range(joined[-1].start, one.stop)
            else:
                joined.append(one)
        return tuple(joined)


Travelling = Literal["keys", "queries"]


class Pairs(NamedTuple):
    """Visible pairs, ``[visiting rank, owner]``, and needed rows, ``[part, visiting rank, owner]``.

    ``visible``: visible (query, key) pairs, of all batch rows together where their masks differ.
    ``first``, ``stop``: the hull of the rows of a part (see ``cuts``) of the owner's that the
    visiting rank computes with, half-open; both are 0 where there is none.
    """

    visible: Ints
    first: Rows32
    stop: Rows32


class _Pieces(NamedTuple):
    """First positions and sizes, ``[rank, piece]``, and the step that all pieces share."""

    first: Ints
    sizes: Ints
    step: int

    def before(self, position: Ints) -> Ints:
        """Counts the positions of each piece before ``position``."""
        found: Ints = np.clip(-((self.first - position) // self.step), 0, self.sizes)
        return found

    def within(self, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Returns first positions and counts of the parts of pieces in ``[begin, end)``."""
        skipped = self.before(begin)
        return self.first + skipped * self.step, self.before(end) - skipped


@lru_cache(maxsize=512)
def _pieces(layout: Layout) -> _Pieces:
    ranges = [layout.ranges(rank) for rank in range(layout.ranks)]
    step = ranges[0][0].step
    assert all(piece.step == step for pieces in ranges for piece in pieces)
    most = max(len(pieces) for pieces in ranges)
    first, count = np.zeros((2, layout.ranks, most), np.int64)
    for rank, pieces in enumerate(ranges):
        first[rank, : len(pieces)] = [piece.start for piece in pieces]
        count[rank, : len(pieces)] = [len(piece) for piece in pieces]
    return _Pieces(first, count, step)


def _sum_clamped(upto: Ints, cap: Ints) -> Ints:
    """Returns the sum of ``clip(y, 0, cap)`` over all integers ``y <= upto``."""
    inside = np.minimum(np.maximum(upto, 0), cap)
    return ((inside * (inside + 1)) >> 1) + np.maximum(upto - cap, 0) * cap


def _pairs_from(least: Ints, n: Ints, m: Ints) -> Ints:
    """Counts the (i, j) with ``0 <= i < n``, ``0 <= j < m`` and ``i - j >= least``."""
    return _sum_clamped(n - least, m) - _sum_clamped(-least, m)


def _band(apart: Ints, step: int, n: Ints, m: Ints, least: Ints, most: Ints) -> tuple[Ints, ...]:
    """Returns visible pairs (i, j) with ``0 <= i < n`` and ``0 <= j < m``, of queries ``apart + i *
    step`` and keys ``j * step``, and the least and the most ``i - j`` of those that the area
    allows, within ``[-m, n]``."""
    low = np.clip(-((apart - least) // step), 1 - m, n)
    high = np.clip((most - apart) // step, -m, n - 1)
    return _pairs_from(low, n, m) - _pairs_from(high + 1, n, m), low, high


def cuts(layout: Layout, mask: Mask, travelling: Travelling) -> Ints:
    """Returns the positions, ``[cut, rank]``, that bound the parts of each rank's rows.

    All rows are one part, except keys with global tokens: of each piece those up to the last global
    tokens in it, which later ranks need, are apart from those after them.
    """
    dealt = _pieces(layout)
    ends = np.repeat([[0], [layout.padded]], layout.ranks, 1)
    if mask.global_tokens is None or travelling == "queries" or dealt.step > 1:
        return ends
    first, stop = dealt.first.T, (dealt.first + dealt.sizes).T
    bounds = np.array(mask.rows[0].boundaries)
    begin = bounds[np.maximum(np.searchsorted(bounds, stop) - 1, 0)]
    after = np.clip(begin + mask.global_tokens, first, stop)
    return np.sort(np.concatenate([ends, after, np.sort(stop, 0)[:-1]]), 0)


@lru_cache(maxsize=32)
def pairs(layout: Layout, mask: Mask, travelling: Travelling = "keys") -> Pairs:
    """Returns visible pairs and needed rows for all pairs of ranks of one ring."""
    parts = list(itertools.pairwise(cuts(layout, mask, travelling)))
    each = []
    for row in mask.rows:
        found = [_pairs(layout, row, travelling, *part) for part in parts]
        visible, first, stop = zip(*found, strict=True)
        each.append(Pairs(reduce(np.add, visible), np.stack(first), np.stack(stop)))
    return each[0] if len(each) == 1 else _of_rows(each, layout.padded)


def _pairs(
    layout: Layout, mask: Mask, travelling: Travelling, low: Ints, high: Ints
) -> tuple[Ints, Ints, Ints]:
    """Returns the same for one batch row, and the owners' positions in ``[low, high)``."""
    dealt = _pieces(layout)
    ranks, pieces = dealt.first.shape
    rectangles = np.stack(areas(mask))
    keys_travel = travelling == "keys"

    # In one area without a window to the left, a rank that needs any key row of another needs the
    # first.
    whole = keys_travel and rectangles.shape[1] == 1 and int(rectangles[-1, 0]) == mask.seq_len
    whole &= mask.global_tokens is None
    visible = np.zeros((ranks, ranks), np.int64)
    lowest = np.full((ranks, ranks), 0 if whole else layout.padded, np.int64)
    highest = np.full((ranks, ranks), -1, np.int64)

    chunk = max(1, _ELEMENTS_AT_ONCE // (ranks * pieces) ** 2)
    block = max(1, _ELEMENTS_AT_ONCE // (chunk * ranks * pieces**2))
    for at in range(0, rectangles.shape[1], chunk):
        begin, end, key, key_end, least, most = rectangles[:, at : at + chunk, None, None]
        key, key_end = (np.clip(x, low[:, None], high[:, None]) for x in (key, key_end))
        # axes: area, piece of the queries, piece of the keys, query rank, key rank
        queries = [x.swapaxes(1, 2)[:, :, None, :, None] for x in dealt.within(begin, end)]
        b, m = (x.swapaxes(1, 2)[:, None, :, None, :] for x in dealt.within(key, key_end))
        bounds = least[..., None, None], most[..., None, None]
        for rank in range(0, ranks, block):
            these = slice(rank, rank + block)
            a, n = (x[:, :, :, these] for x in queries)
            seen, near, far = _band(a - b, dealt.step, n, m, *bounds)
            # Key j meets the queries [j + near, j + far], query i the keys [i - far, i - near].
            if keys_travel:
                of, start, stop = b, -far, np.minimum(m, n - near)
            else:
                of, start, stop = a, near, np.minimum(n, m + far)
            visible[these] += seen.sum((0, 1, 2))
            last = np.where(seen > 0, of + (stop - 1) * dealt.step, -1)
            np.maximum(highest[these], last.max((0, 1, 2)), out=highest[these])
            if not whole:
                start = np.where(seen > 0, of + np.maximum(start, 0) * dealt.step, layout.padded)
                np.minimum(lowest[these], start.min((0, 1, 2)), out=lowest[these])
    if not keys_travel:
        visible, lowest, highest = visible.T, lowest.T, highest.T

    def local_row(position: Ints) -> Ints:
        """Counts the local rows of the owner before ``position``."""
        rows = np.zeros_like(position)
        for piece in range(pieces):
            one = _Pieces(dealt.first[:, piece], dealt.sizes[:, piece], dealt.step)
            rows += one.before(position)
        return rows

    some = highest >= 0
    first_row = lowest if whole else np.where(some, local_row(np.where(some, lowest, 0)), 0)
    stop_row = np.where(some, local_row(highest) + 1, 0)
    return visible, first_row.astype(np.int32), stop_row.astype(np.int32)


def _of_rows(each: list[Pairs], padded: int) -> Pairs:
    """Returns the sum of visible pairs and the hull of needed rows of all batch rows."""
    visible, first, stop = map(np.stack, zip(*each, strict=True))
    lowest, highest = np.where(stop > first, first, padded).min(0), stop.max(0)
    return Pairs(visible.sum(0), np.where(highest > 0, lowest, 0), highest)


def total_visible(mask: Mask) -> int:
    """Returns the visible (query, key) pairs of the whole sequence, the same in every partition."""
    query, query_stop, key, key_stop, least, most = areas(mask)
    seen, *_ = _band(query - key, 1, query_stop - query, key_stop - key, least, most)
    return int(seen.sum())
