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
from ringray.partition import Dealt, Partitioning
from ringray.traffic import by_area
from ringray.traffic.areas import areas
from ringray.traffic.bands import band
from ringray.traffic.mask import Mask

Ints = NDArray[np.signedinteger]
Rows32 = NDArray[np.int32]  # a large ring has many pairs of ranks


_ELEMENTS_AT_ONCE = 1 << 16  # bounds the memory of one vectorised step over documents and ranks
_NARROW = 1 << 31  # numbers below it take half the time


@dataclass(frozen=True)
class Layout:
    """The positions of a sequence on the ranks of a ring.

    ``partition``: the name of a rule, or what ``ringray.deal`` returns. ``padded``: length that is
    dealt (tokens). ``ranks``: of the ring. ``fold``: shards per rank: 1, or the Ulysses degree
    where an exchange of heads for rows has joined consecutive shards.
    """

    partition: Partitioning
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
        dealt = [piece for shard in shards for piece in rule.ranges(self.padded, world_size, shard)]
        joined: list[range] = []
        for piece in sorted((piece for piece in dealt if piece), key=lambda piece: piece.start):
            if joined and piece.step == 1 and joined[-1].stop == piece.start:
                joined[-1] = range(joined[-1].start, piece.stop)
            else:
                joined.append(piece)
        return tuple(joined)


Travelling = Literal["keys", "queries"]


class Pairs(NamedTuple):
    """Visible pairs, ``[visiting rank, owner]``, and needed rows, ``[part, visiting rank, owner]``.

    ``visible``: visible (query, key) pairs, of all batch rows together where their masks differ.
    ``first``, ``stop``: the hull of the rows of a part (see ``cuts``) of the owner's that the
    visiting rank computes with, half-open; both are 0 where there is none. ``runs``: these rows
    without those between that nobody needs, where they are counted so.
    """

    visible: Ints
    first: Rows32
    stop: Rows32
    runs: by_area.Runs | None = None


class _Pieces(NamedTuple):
    """First positions and sizes, ``[piece, rank]``, and the step that all pieces share."""

    first: Ints
    sizes: Ints
    step: int

    def before(self, position: Ints) -> Ints:
        """Counts the positions of each piece before ``position``."""
        count: Ints = np.clip(-((self.first - position) // self.step), 0, self.sizes)
        return count

    def within(self, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
        """Returns first positions and counts of the parts of pieces in ``[begin, end)``."""
        skipped = self.before(begin)
        return self.first + skipped * self.step, self.before(end) - skipped


def _pieces(layout: Layout) -> _Pieces:
    """Returns the pieces of all ranks; ranks with fewer pieces than others have empty ones."""
    ranges = [layout.ranges(rank) for rank in range(layout.ranks)]
    step, most = ranges[0][0].step, max(map(len, ranges))
    none = (range(0),) * most
    bounds = [
        (piece.start, piece.stop) for pieces in ranges for piece in (*pieces, *none[len(pieces) :])
    ]
    shape = layout.ranks, most, 2
    first, stop = np.array(bounds, np.int64).reshape(shape).transpose(2, 1, 0).copy()
    return _Pieces(first, np.maximum(-((first - stop) // step), 0), step)


def cuts(layout: Layout, mask: Mask, travelling: Travelling) -> Ints:
    """Returns the positions, ``[cut, rank]``, that bound the parts of each rank's rows.

    All rows are one part, except keys of which some are seen from afar (``Mask.far_keys``): of each
    piece those up to the last such ones in it, which later ranks need, are apart from the rest.
    """
    ends = np.repeat([[0], [layout.padded]], layout.ranks, 1)
    far_keys = mask.rows[0].far_keys
    if far_keys is None or travelling == "queries" or isinstance(layout.partition, Dealt):
        return ends
    dealt = _pieces(layout)
    if dealt.step > 1:
        return ends
    first, stop = dealt.first, dealt.first + dealt.sizes
    begins, tokens = np.array(far_keys[0]), far_keys[1]
    begin = begins[np.maximum(np.searchsorted(begins, stop) - 1, 0)]
    after = np.clip(begin + tokens, first, stop)
    return np.sort(np.concatenate([ends, after, np.sort(stop, 0)[:-1]]), 0)


@lru_cache(maxsize=32)
def pairs(layout: Layout, mask: Mask, travelling: Travelling = "keys") -> Pairs:
    """Returns visible pairs and needed rows for all pairs of ranks of one ring."""
    if _by_area(layout, mask):
        return _of_areas(layout, mask, travelling)
    bounds = cuts(layout, mask, travelling)
    rows = [_in_parts(layout, row, bounds, travelling) for row in mask.rows]
    return rows[0] if len(rows) == 1 else _of_rows(rows, layout.padded)


def _by_area(layout: Layout, mask: Mask) -> bool:
    """Tells whether to count pieces area by area: a rank holds many of them, or there are many
    areas. Keys that are seen from afar travel in parts, unless pieces are dealt one by one."""
    if isinstance(layout.partition, Dealt):
        return layout.ranges(0)[0].step == 1
    packed = mask.documents is not None or mask.chunk is not None
    return packed and mask.rows[0].far_keys is None and layout.ranges(0)[0].step == 1


def _of_areas(layout: Layout, mask: Mask, travelling: Travelling) -> Pairs:
    """Returns the same, counted area by area."""
    bounds = [
        (piece.start, piece.stop, rank)
        for rank in range(layout.ranks)
        for piece in layout.ranges(rank)
        if piece
    ]
    dealt = by_area.pieces(*np.array(bounds, np.int64).T)
    visible, keys, queries = by_area.pairs(dealt, layout.ranks, mask)
    # Tables are [visiting rank, owner], whichever side travels.
    runs = keys if travelling == "keys" else queries
    some = runs.bounds[:-1] < runs.bounds[1:]
    # The runs of a pair stand in the order of rows: its hull is from its first to its last.
    first, stop = np.zeros((2, len(some)), np.int32)
    first[some] = runs.start[runs.bounds[:-1][some]]
    stop[some] = runs.stop[runs.bounds[1:][some] - 1]
    shape = 1, layout.ranks, layout.ranks
    visible = visible if travelling == "keys" else visible.T
    return Pairs(visible, first.reshape(shape), stop.reshape(shape), runs)


def _in_parts(layout: Layout, mask: Mask, bounds: Ints, travelling: Travelling) -> Pairs:
    """Returns the same for a mask of one batch row; ``bounds``: the ``cuts``."""
    dealt, padded = _pieces(layout), layout.padded
    rectangles = np.stack(areas(mask))
    unbounded = bool((rectangles[-1] >= mask.seq_len).all())
    # No number on the way to positions, and to the pairs of two pieces, is larger.
    largest = max(4 * padded, 2 * (int(dealt.sizes.max()) + 1) ** 2)
    dtype = np.int32 if largest < _NARROW else np.int64
    dealt = dealt._replace(first=dealt.first.astype(dtype), sizes=dealt.sizes.astype(dtype))
    parts = [
        _pairs(dealt, rectangles.astype(dtype), padded, travelling, part, unbounded)
        for part in itertools.pairwise(bounds.astype(dtype))
    ]
    visible, first, stop = zip(*parts, strict=True)
    return Pairs(reduce(np.add, visible), np.stack(first), np.stack(stop))


def _pairs(
    dealt: _Pieces,
    rectangles: Ints,
    padded: int,
    travelling: Travelling,
    part: tuple[Ints, Ints],
    unbounded: bool,
) -> tuple[Ints, Ints, Ints]:
    """Returns the same for the owners' positions within ``part``; ``unbounded``: no area has a
    window to the left."""
    (low, high), (pieces, ranks) = part, dealt.first.shape
    keys_travel = travelling == "keys"
    # In one such area a rank that needs any key row of another needs the first of the part.
    whole = unbounded and keys_travel and rectangles.shape[1] == 1 and not low.any()
    visible = np.zeros((ranks, ranks), np.int64)
    lowest = np.full(visible.shape, 0 if whole else padded, rectangles.dtype)
    beyond = np.zeros_like(lowest)  # one more than the highest; 0 where nothing is visible

    every = (ranks * pieces) ** 2
    chunk = max(1, _ELEMENTS_AT_ONCE // every)
    block = max(1, _ELEMENTS_AT_ONCE // (chunk * every // ranks))
    for area in range(0, rectangles.shape[1], chunk):
        begin, end, key, key_end, least, most = rectangles[:, area : area + chunk, None, None]
        key, key_end = (np.clip(x, low, high) for x in (key, key_end))
        # axes: area, piece of the queries, piece of the keys, query rank, key rank
        queries = [x[:, :, None, :, None] for x in dealt.within(begin, end)]
        b, m = (x[:, None, :, None] for x in dealt.within(key, key_end))
        least, most = (x[:, :, :, None, None] for x in (least, most))
        for rank in range(0, ranks, block):
            these = slice(rank, rank + block)
            a, n = (x[:, :, :, these] for x in queries)
            bounds = least, None if unbounded else most
            seen, near, far = band(a - b, dealt.step, n, m, *bounds)
            # Key j meets the queries [j + near, j + far], query i the keys [i - far, i - near].
            if keys_travel:
                of, start, stop = b, -far, np.minimum(m, n - near)
            else:
                of, start, stop = a, near, np.minimum(n, m + far)
            visible[these] += seen.sum((0, 1, 2))
            after = np.where(seen > 0, of + (stop - 1) * dealt.step + 1, 0)
            np.maximum(beyond[these], after.max((0, 1, 2)), out=beyond[these])
            if not whole:
                start = np.where(seen > 0, of + np.maximum(start, 0) * dealt.step, padded)
                np.minimum(lowest[these], start.min((0, 1, 2)), out=lowest[these])
    if not keys_travel:
        visible, lowest, beyond = (x.swapaxes(0, 1) for x in (visible, lowest, beyond))

    def local_row(position: Ints) -> Ints:
        """Counts the local rows of the owner before ``position``."""
        rows = np.zeros_like(position)
        for piece in range(pieces):
            of_piece = _Pieces(dealt.first[piece], dealt.sizes[piece], dealt.step)
            rows += of_piece.before(position)
        return rows

    first_row = lowest if whole else local_row(np.where(beyond > 0, lowest, 0))
    return visible, first_row.astype(np.int32), local_row(beyond).astype(np.int32)


def _of_rows(each: list[Pairs], padded: int) -> Pairs:
    """Returns the sum of visible pairs and the hull of needed rows of all batch rows."""
    visible, first, stop = map(np.stack, zip(*(rows[:3] for rows in each), strict=True))
    lowest, highest = np.where(stop > first, first, padded).min(0), stop.max(0)
    return Pairs(visible.sum(0), np.where(highest > 0, lowest, 0), highest)


def total_visible(mask: Mask) -> int:
    """Returns the visible (query, key) pairs of the whole sequence, the same in every partition."""
    if mask.plain:
        return mask.seq_len * (mask.seq_len + 1) // 2 if mask.causal else mask.seq_len**2
    query, query_stop, key, key_stop, least, most = areas(mask)
    seen, *_ = band(query - key, 1, query_stop - query, key_stop - key, least, most)
    return int(seen.sum())
