"""The dealer: the ranks that hold the rows of packed documents, evenly and close together.

Every rank gets the same number of rows, and work (visible pairs) by its weight. A document goes to
one rank, where it sends nothing, if that leaves the others even work. Else it is shared by just
enough ranks, each with an early and a late part of it, as in a zigzag. Three steps:

1. Documents are placed, the densest first (most pairs a row). What is placed later is lighter, so
   room that is left on a rank counts with the work of the light rows that will fill it.
2. Shared documents are cut: from both ends inwards, rank by rank, so that early and late rows give
   each rank the work that it lacks.
3. The second step is repeated with what the other documents then leave to each rank.

Imports numpy only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.traffic.by_area import visible_before
from ringray.traffic.mask import Mask

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TILE = 128  # rows of the kernels; shares of documents are multiples where the room allows
_SHORT = 1024  # rows of documents, and of neighbouring ones together, that are placed by room alone
_WHOLE = 0.03  # of a rank's work, by which a document that stays whole may exceed it
_SPARED = (0.025, 0.01)  # of a rank's work, by which ranks may exceed it if that spares another
_EVEN = 0.95  # balance from which the second of these is not tried
_ROUNDS = 3  # of cutting
_CROWDED = 0.6  # importance of rows received for other documents, beside that of uneven work
_UNBROKEN = 0.01  # of a rank's work, that a part in one piece may differ from one in two pieces


class Item(NamedTuple):
    """Neighbouring positions that are placed together: a document, or several short ones."""

    begin: int
    stop: int
    work: float

    @property
    def rows(self) -> int:
        """Returns the number of positions."""
        return self.stop - self.begin


class Share(NamedTuple):
    """The part of an item that a rank gets: rows, and the work that it should have."""

    rank: int
    rows: int
    work: float


class DealtPiece(NamedTuple):
    """Neighbouring positions of one rank."""

    begin: int
    stop: int
    rank: int


def deal(mask: Mask, padded: int, weights: Sequence[float]) -> list[DealtPiece]:
    """Returns the pieces of all ranks, in the order of positions. ``padded``: positions, a multiple
    of the number of ranks. ``weights``: of each rank, its speed."""
    rows = padded // len(weights)
    work, tables = _QueryWork(mask, padded, rows), list[_Table]()
    for spared in _SPARED:
        tables.append(_Table(work, rows, np.array(weights, np.float64), spared))
        tables[-1].deal()
        if tables[-1].longest * _EVEN <= 1:
            break
    table = min(tables, key=lambda table: table.longest)
    # Neighbours that came to one rank are one piece: fewer ranges for each rank to look up.
    pieces = sorted(table.whole + [piece for pieces in table.cuts.values() for piece in pieces])
    joined: list[DealtPiece] = []
    for piece in pieces:
        if joined and (joined[-1].stop, joined[-1].rank) == (piece.begin, piece.rank):
            joined[-1] = joined[-1]._replace(stop=piece.stop)
        else:
            joined.append(piece)
    return joined


class _QueryWork:
    """The work of any positions, by their queries, and the items that they form.

    It is counted at the edges of tiles and documents; within a tile it grows evenly.
    """

    def __init__(self, mask: Mask, padded: int, rows: int) -> None:
        self.tile = min(TILE, max(1, rows // 16))
        ends = set(mask.rows[0].boundaries).intersection(*(row.boundaries for row in mask.rows))
        bounds = np.array(sorted({*ends, padded}), np.int64)
        if mask.chunk is not None:
            size = -(-np.diff(bounds) // mask.chunk) * mask.chunk
            parts = [np.arange(b, b + n, mask.chunk) for b, n in zip(bounds, size, strict=False)]
            bounds = np.append(np.concatenate(parts), padded)
        # A table of a million edges is fine enough for any length.
        edges = np.union1d(bounds, np.arange(0, padded, max(self.tile, padded >> 20)))
        # np.interp copies edges of another type at each call.
        self._edges, self._before = edges.astype(np.float64), visible_before(mask, edges)
        short = min(_SHORT, max(1, rows // 16))
        self.items = [
            Item(begin, stop, float(self.before(stop) - self.before(begin)))
            for begin, stop in _bundled(bounds.tolist(), short)
        ]
        self.short = short

    def before(self, positions: Ints | int) -> Floats:
        """Returns the work of all queries before ``positions``."""
        return np.asarray(np.interp(positions, self._edges, self._before))


def _bundled(bounds: list[int], most: int) -> list[tuple[int, int]]:
    """Returns the items between ``bounds``: neighbours that have up to ``most`` rows together are
    one."""
    items: list[tuple[int, int]] = []
    for begin, stop in itertools.pairwise(bounds):
        if items and stop - items[-1][0] <= most:
            items[-1] = items[-1][0], stop
        else:
            items.append((begin, stop))
    return items


class _Table:
    """All items, the densest first, and what every rank has of them so far."""

    def __init__(self, work: _QueryWork, rows: int, weights: Floats, spared: float) -> None:
        self.work, self._spared = work, spared
        self.items = sorted(work.items, key=lambda item: (-item.work / item.rows, item.begin))
        ranks = len(weights)
        sizes = np.array([item.rows for item in self.items])
        works = np.array([item.work for item in self.items])
        self._target = works.sum() * weights / weights.sum()
        self._room, self._load = np.full(ranks, rows), np.zeros(ranks)
        self._received = np.zeros(ranks)  # rows of shared items that others hold
        # Work a row of all items that come after one.
        later = np.append(works[::-1].cumsum()[::-1][1:], 0.0)
        later_rows = np.append(sizes[::-1].cumsum()[::-1][1:], 1)
        self._later = np.minimum(later / later_rows, _filling(sizes, works, rows, ranks))
        self.whole: list[DealtPiece] = []
        self.shares: dict[Item, list[Share]] = {}
        self.cuts: dict[Item, list[DealtPiece]] = {}

    @property
    def longest(self) -> float:
        """Returns the longest time of a rank over the mean, which its target stands for."""
        return float((self._load / np.maximum(self._target, 1e-9)).max())

    def deal(self) -> None:
        """Places all items, the densest first, and cuts those that are shared."""
        for number in range(len(self.items)):
            self._place(number)
        self._cut()

    def _place(self, number: int) -> None:
        """Gives an item to one rank, or shares of it to several."""
        item, light = self.items[number], self._later[number]
        target, room, load = self._target, self._room, self._load
        # Short items are placed by room alone: their work hardly counts, and rows must be equal.
        fits = room >= item.rows
        if item.rows > self.work.short:
            after = load + light * (room - item.rows) + item.work
            fits &= after <= target + _WHOLE * target.mean()
        (ranks,) = fits.nonzero()
        if len(ranks):
            # The rank whose room has to be filled with the densest rows.
            lacking = (target[ranks] - load[ranks]) / room[ranks]
            rank = int(ranks[lacking.argmax()])
            self.whole.append(DealtPiece(item.begin, item.stop, rank))
            room[rank] -= item.rows
            load[rank] += item.work
            return
        shares = self._shared(item, target - load - light * room, item.work - light * item.rows)
        for share in shares:
            room[share.rank] -= share.rows
            load[share.rank] += share.work
            self._received[share.rank] += item.rows - share.rows
        self.shares[item] = shares

    def _shared(self, item: Item, lacking: Floats, need: float) -> list[Share]:
        """Returns the shares of just enough ranks. ``lacking``: work that each rank lacks beyond
        that of light rows in its room; ``need``: the same of the item."""
        order = [int(rank) for rank in np.argsort(-lacking, kind="stable") if self._room[rank]]
        spared, work, rows, count = self._spared * self._target.mean(), 0.0, 0, 0
        while count < len(order) and (work + spared * count < need or rows < item.rows):
            work += max(float(lacking[order[count]]), 0.0)
            rows += int(self._room[order[count]])
            count += 1
        ranks = np.array(order[:count])
        parts = np.maximum(lacking[ranks], 1e-6 * self._target.mean())
        if need > 0:  # the last rank takes what the others leave
            parts[-1] = max(parts[-1] - max(parts.sum() - need, 0.0), 0.0)
        parts /= parts.sum()
        room, tile = self._room[ranks], self.work.tile
        exact = np.minimum((parts * item.rows).astype(np.int64), room)
        dealt = exact // tile * tile
        missing = item.rows - int(dealt.sum())
        # Rows that rounding has taken go back in tiles, to the ranks that have lost most.
        for place in np.argsort(dealt - exact, kind="stable"):
            if missing >= tile and room[place] - dealt[place] >= tile:
                dealt[place] += tile
                missing -= tile
        # What is less than a tile, or was missing for want of room, goes where most room is.
        for place in np.argsort(dealt - room, kind="stable"):
            extra = min(missing, int(room[place] - dealt[place]))
            dealt[place] += extra
            missing -= extra
        return [
            Share(int(rank), int(rows), float(part * item.work))
            for rank, rows, part in zip(ranks, dealt, parts, strict=True)
            if rows
        ]

    def _cut(self) -> None:
        """Cuts the shared items, the longest last: it can even out most."""
        items = sorted(self.shares, key=lambda item: (item.rows, item.begin))
        for _ in range(_ROUNDS):
            for item in items:
                for share in self.shares[item]:
                    self._load[share.rank] -= share.work
                # What the other documents leave to each rank; at least a little, to divide by it.
                lacking = self._target - self._load
                wanted = [
                    share._replace(work=max(float(lacking[share.rank]), 1.0))
                    for share in self.shares[item]
                ]
                self.cuts[item], self.shares[item] = self._peeled(item, wanted)
                for share in self.shares[item]:
                    self._load[share.rank] += share.work

    def _peeled(self, item: Item, shares: list[Share]) -> tuple[list[DealtPiece], list[Share]]:
        """Returns the pieces of an item, and the shares with the work that these have."""
        before, low, high = self.work.before, item.begin, item.stop
        rest = sum(share.work for share in shares)
        mean = rest / item.rows
        pieces: list[DealtPiece] = []
        done: list[Share] = []

        def outermost(share: Share) -> float:
            """Returns less for a rank that needs very light or heavy rows, which are outside, and
            more for one that receives much else: outside it needs almost all rows."""
            uneven = abs(share.work / share.rows / mean - 1) if mean else 0.0
            other = (self._received[share.rank] - item.rows) / item.rows
            return _CROWDED * other - uneven

        *first, last = sorted(shares, key=outermost)
        for share in first:
            step = self.work.tile if share.rows >= self.work.tile else 1
            late = np.append(np.arange(0, share.rows, step), share.rows)
            early = share.rows - late
            work_before = before(np.concatenate([[low, high], low + early, high - late]))
            begin, end = work_before[:2].tolist()
            of_early, of_late = work_before[2:].reshape(2, -1)
            work = of_early - begin + end - of_late
            # What earlier ranks missed of their work is spread over all that remain.
            wanted = share.work * (end - begin) / rest
            rest -= share.work
            broken = (late > 0) & (early > 0)
            error = abs(work - wanted) + _UNBROKEN * wanted * broken
            # The split into early and late rows of the nearest work; in one piece if that is near.
            best = int(error.argmin())
            pieces.append(DealtPiece(low, low + int(early[best]), share.rank))
            pieces.append(DealtPiece(high - int(late[best]), high, share.rank))
            done.append(share._replace(work=float(work[best])))
            low, high = pieces[-2].stop, pieces[-1].begin
        # The last rank has the middle, whose rows have the mean work.
        pieces.append(DealtPiece(low, high, last.rank))
        done.append(last._replace(work=float(before(high) - before(low))))
        return [piece for piece in pieces if piece.begin < piece.stop], done


def _filling(sizes: Ints, works: Floats, rows: int, ranks: int) -> float:
    """Returns the work a row of what fills the ranks that share long items.

    These are as many as have, with their part of the long items and the lightest rows of all others
    in the rest of their room, the mean work.
    """
    mean, light = works.sum() / ranks, 0.0
    lightest_rows = np.append(0, sizes[::-1].cumsum())
    lightest_work = np.append(0.0, works[::-1].cumsum())
    for _ in range(4):  # which items are long depends on the result
        long = works - light * sizes > mean - light * rows
        if not long.any():
            break
        sharing = np.linspace(max(1.0, sizes[long].sum() / rows), ranks, 256)
        room = sharing * rows - sizes[long].sum()
        spare = sharing * mean - works[long].sum() - np.interp(room, lightest_rows, lightest_work)
        enough = int((spare >= 0).argmax()) if (spare >= 0).any() else len(sharing) - 1
        filled = max(float(room[enough]), 1.0)
        light = float(np.interp(filled, lightest_rows, lightest_work)) / filled
    return light
