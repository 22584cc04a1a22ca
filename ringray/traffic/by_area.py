"""Visible pairs and needed rows of packed sequences, area by area: only the pieces that meet there.

A rank of packed documents holds many pieces, and most of them see none of another rank. Here the
pieces of an area are looked up by position, so the work grows with the pairs that see each other,
not with all pairs of pieces. Imports numpy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.traffic.areas import Areas, areas
from ringray.traffic.bands import band
from ringray.traffic.mask import Mask

Ints = NDArray[np.int64]

_PAIRS_AT_ONCE = 1 << 18  # bounds the memory of one step


class Pieces(NamedTuple):
    """All pieces of neighbouring positions, in their order: they cover the sequence. ``owner``: the
    rank of each, ``row``: the local row of its first position."""

    begin: Ints
    stop: Ints
    owner: Ints
    row: Ints


@dataclass(frozen=True, eq=False)
class Runs:
    """The needed rows of all pairs of ranks as runs of neighbouring rows, not as hulls.

    ``bounds``: the runs of the rows of ``owner`` that ``visitor`` needs are those from
    ``bounds[visitor * ranks + owner]`` to the next. ``start``, ``stop``: local rows of the owner.
    ``rows``: how many they are together, ``[visitor, owner]``.
    """

    bounds: Ints
    start: Ints
    stop: Ints
    rows: Ints

    def of(self, visitor: int, owner: int) -> tuple[tuple[int, int], ...]:
        """Returns the runs of one pair of ranks."""
        pair = visitor * len(self.rows) + owner
        these = slice(self.bounds[pair], self.bounds[pair + 1])
        return tuple(zip(self.start[these].tolist(), self.stop[these].tolist(), strict=True))


def pieces(begin: Ints, stop: Ints, owner: Ints) -> Pieces:
    """Puts pieces in the order of their positions and counts their rows."""
    order = np.argsort(begin)
    begin, stop, owner = begin[order], stop[order], owner[order]
    # Rows of one rank stand in the order of positions.
    by_owner = np.argsort(owner, kind="stable")
    sizes = (stop - begin)[by_owner]
    before = sizes.cumsum() - sizes
    first = np.searchsorted(owner[by_owner], owner[by_owner])
    row = np.empty_like(begin)
    row[by_owner] = before - before[first]
    return Pieces(begin, stop, owner, row)


def visible_before(mask: Mask, edges: Ints) -> NDArray[np.float64]:
    """Returns the visible pairs of all queries before each of the ascending ``edges``, 0 first."""
    total = np.zeros(len(edges) - 1)
    for row in mask.rows:
        every = areas(row)
        for area, query in _blocks(*_meeting(edges[:-1], edges[1:], every.query, every.query_stop)):
            begin = np.maximum(edges[query], every.query[area])
            rows = np.minimum(edges[query + 1], every.query_stop[area]) - begin
            keys = every.key_stop[area] - every.key[area]
            apart = begin - every.key[area]
            seen, *_ = band(apart, 1, rows, keys, every.least[area], every.most[area])
            total += np.bincount(query, seen, len(total))
    return np.append(0.0, total.cumsum())


def pairs(dealt: Pieces, ranks: int, mask: Mask) -> tuple[Ints, Runs, Runs]:
    """Returns the visible pairs, ``[query rank, key rank]``, of all batch rows; the key rows of
    each owner that each other rank needs, and the query rows that need a rank's keys."""
    visible = np.zeros(ranks * ranks, np.int64)
    of_keys: list[Ints] = []
    of_queries: list[Ints] = []
    for row in mask.rows:
        # Areas have no pair in common, so what they hold adds up.
        every = areas(row)
        queries = _meeting(dealt.begin, dealt.stop, every.query, every.query_stop)
        keys = _meeting(dealt.begin, dealt.stop, every.key, every.key_stop)
        for area, query, key in _products(queries, keys):
            seen, *needed = _seen(dealt, every, area, query, key)
            # Keys travel to the rank of the queries, queries to that of the keys.
            pair = dealt.owner[query] * ranks + dealt.owner[key]
            np.add.at(visible, pair, seen)
            back = dealt.owner[key] * ranks + dealt.owner[query]
            for runs, places, (start, stop) in zip(
                (of_keys, of_queries), (pair, back), needed, strict=True
            ):
                runs.append(np.stack([places, start, stop])[:, seen > 0])
    return visible.reshape(ranks, ranks), _joined(of_keys, ranks), _joined(of_queries, ranks)


def _seen(
    dealt: Pieces, every: Areas, area: Ints, query: Ints, key: Ints
) -> tuple[Ints, tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Returns the visible pairs of pieces that meet in an area, and the local rows of keys and of
    queries that have some."""
    a, b = (
        np.maximum(x, y)
        for x, y in ((dealt.begin[query], every.query[area]), (dealt.begin[key], every.key[area]))
    )
    n = np.minimum(dealt.stop[query], every.query_stop[area]) - a
    m = np.minimum(dealt.stop[key], every.key_stop[area]) - b
    seen, near, far = band(a - b, 1, n, m, every.least[area], every.most[area])
    # Key j meets the queries [j + near, j + far], query i the keys [i - far, i - near].
    key_row = dealt.row[key] + b - dealt.begin[key]
    query_row = dealt.row[query] + a - dealt.begin[query]
    of_keys = key_row + np.maximum(-far, 0), key_row + np.minimum(m, n - near)
    of_queries = query_row + np.maximum(near, 0), query_row + np.minimum(n, m + far)
    return seen, of_keys, of_queries


def _meeting(begin: Ints, stop: Ints, low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Returns the first piece that meets each range of positions, and how many do."""
    first = np.searchsorted(stop, low, side="right")
    return first, np.searchsorted(begin, high) - first


def _blocks(first: Ints, count: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yields (range, piece) of all pieces that meet ranges, some at a time."""
    # All (range, piece) are numbered; a number belongs to the first range that ends after it.
    ends = count.cumsum()
    for begin in range(0, int(ends[-1]), _PAIRS_AT_ONCE):
        index = np.arange(begin, min(begin + _PAIRS_AT_ONCE, int(ends[-1])))
        which = np.searchsorted(ends, index, side="right")
        yield which, first[which] + index - (ends - count)[which]


def _products(
    queries: tuple[Ints, Ints], keys: tuple[Ints, Ints]
) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yields (area, piece of queries, piece of keys) of all that meet, some at a time."""
    (first_query, count), (first_key, keys_of) = queries, keys
    for area, place in _blocks(np.zeros_like(count), count * keys_of):
        query, key = np.divmod(place, keys_of[area])
        yield area, first_query[area] + query, first_key[area] + key


def _joined(parts: list[Ints], ranks: int) -> Runs:
    """Returns the union of runs, each with its pair of ranks."""
    pair, start, stop = np.concatenate([np.zeros((3, 0), np.int64), *parts], 1)
    # By pair and start, so that runs which touch follow each other.
    order = np.lexsort((start, pair))
    pair, start, stop = pair[order], start[order], stop[order]
    # Stops reach as far as any run of the same pair before: pairs are kept apart by an offset.
    apart = pair * (int(stop.max(initial=0)) + 1)
    reach = np.maximum.accumulate(stop + apart)
    begins = np.append(True, start[1:] + apart[1:] > reach[:-1])[: len(start)]
    (first,) = begins.nonzero()
    last = np.append(first[1:], len(start)) - 1
    pair, start, stop = pair[first], start[first], (reach - apart)[last[: len(first)]]
    bounds = np.searchsorted(pair, np.arange(ranks * ranks + 1))
    rows = np.zeros(ranks * ranks, np.int64)
    np.add.at(rows, pair, stop - start)
    return Runs(bounds, start, stop, rows.reshape(ranks, ranks))
