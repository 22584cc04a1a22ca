"""Visible pairs and needed rows of all pairs of ranks, in closed form: no rows are listed.

The ranges of a partition share one step, so "query p sees key k" between two ranges depends only on
the difference of two indices, and the visible pairs and the needed key rows have formulas. FLOPs,
balance and traffic of the planner, and all messages of the ring, follow from them. Imports numpy
only.

Arrays are int64 and indexed ``[visiting rank, owner]``: keys travel from their owner to the ranks
whose queries see them, or queries to the ranks whose keys they see; rows are the owner's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray import partition as partitions

Ints = NDArray[np.int64]


_ELEMENTS_AT_ONCE = 1 << 20  # bounds the memory of one vectorised step over documents


@dataclass(frozen=True)
class Mask:
    """The keys that each query sees, in global positions (tokens).

    ``seq_len``: true length; positions from there on are padding: they are not seen and see
    nothing. ``window``: a query at p sees ``[p - window, p]`` (causal only). ``documents``:
    boundaries ``(0, ..., seq_len)`` of packed documents; a query sees its own document only.

    Raises:
        ValueError: no tokens, a window without ``causal``, or boundaries that decrease or do not
            go from 0 to ``seq_len``.
    """

    seq_len: int
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.seq_len < 1:
            raise ValueError(f"seq_len: got {self.seq_len}, expected at least 1 token")
        if self.window is not None and self.window < 0:
            raise ValueError(f"window: got {self.window}, expected None or an integer >= 0")
        if self.window is not None and not self.causal:
            raise ValueError(
                f"window={self.window} with causal=False: a window looks back from its query, "
                "so it needs causal=True"
            )
        if self.documents is not None:
            bounds = self.documents
            if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != self.seq_len:
                raise ValueError(
                    "cu_seqlens: expected boundaries from 0 to seq_len "
                    f"({self.seq_len}), got {_brief(bounds)}"
                )
            if any(a > b for a, b in itertools.pairwise(bounds)):
                raise ValueError(f"cu_seqlens: boundaries must not decrease, got {_brief(bounds)}")

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Returns the document boundaries; one document if nothing is packed."""
        return self.documents if self.documents is not None else (0, self.seq_len)


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
    """Visible pairs and needed rows, ``[visiting rank, owner]``.

    ``visible``: visible (query, key) pairs. ``first``, ``stop``: the hull of the owner's rows that
    the visiting rank computes with, half-open; both are 0 where there is none.
    """

    visible: Ints
    first: Ints
    stop: Ints


def _brief(values: tuple[int, ...]) -> str:
    return str(values) if len(values) <= 8 else f"{values[:4]} ... {values[-2:]}"


@lru_cache(maxsize=512)
def _pieces(layout: Layout) -> tuple[Ints, Ints, int]:
    """Returns first positions and counts, ``[rank, piece]``, and the step that all pieces share."""
    ranges = [layout.ranges(rank) for rank in range(layout.ranks)]
    step = ranges[0][0].step
    assert all(piece.step == step for pieces in ranges for piece in pieces)
    most = max(len(pieces) for pieces in ranges)
    first, count = np.zeros((2, layout.ranks, most), np.int64)
    for rank, pieces in enumerate(ranges):
        first[rank, : len(pieces)] = [piece.start for piece in pieces]
        count[rank, : len(pieces)] = [len(piece) for piece in pieces]
    return first, count, step


def _sum_clamped(upto: Ints, cap: Ints) -> Ints:
    """Returns the sum of ``clip(y, 0, cap)`` over all integers ``y <= upto``."""
    inside = np.minimum(np.maximum(upto, 0), cap)
    return ((inside * (inside + 1)) >> 1) + np.maximum(upto - cap, 0) * cap


def _pairs_from(least: Ints, n: Ints, m: Ints) -> Ints:
    """Counts the (i, j) with ``0 <= i < n``, ``0 <= j < m`` and ``i - j >= least``."""
    return _sum_clamped(n - least, m) - _sum_clamped(-least, m)


def _piece_pairs(
    mask: Mask, step: int, a: Ints, n: Ints, b: Ints, m: Ints
) -> tuple[Ints, Ints | np.int64, Ints]:
    """Returns visible pairs, and first and last needed j (last < first where no key is needed), for
    query ranges ``a + i*step`` (i < n) and key ranges ``b + j*step`` (j < m) of one document."""
    if not mask.causal:
        return n * m, np.int64(0), np.where(n > 0, m, 0) - 1
    # p - k = (a - b) + (i - j) * step must lie in [0, window].
    visible = _pairs_from(-((a - b) // step), n, m)
    # The first query at or after key k is k + lag, wherever k lies at or after the first query.
    lag = (a - b) % step if step > 1 else 0
    last_j = np.minimum((a + (n - 1) * step - lag - b) // step, m - 1)
    first_j: Ints | np.int64
    if mask.window is None:
        first_j = np.int64(0)
    else:
        beyond = (mask.window - (a - b)) // step + 1
        visible = visible - _pairs_from(beyond, n, m)
        first_j = np.maximum(-((b - (a - mask.window)) // step), 0)
        last_j = np.where(lag <= mask.window, last_j, -1)
    return visible, first_j, np.where((n > 0) & (m > 0), last_j, -1)


def _mirrored_pairs(
    mask: Mask, step: int, a: Ints, n: Ints, b: Ints, m: Ints
) -> tuple[Ints, Ints | np.int64, Ints]:
    """Returns the same as ``_piece_pairs``, but the first and last needed *query* index: mirrored,
    the sequence has keys that see the queries within their window."""
    keys, queries = -(b + (m - 1) * step), -(a + (n - 1) * step)
    visible, first_j, last_j = _piece_pairs(mask, step, keys, m, queries, n)
    return visible, np.maximum(n - 1 - last_j, 0), np.where(last_j >= first_j, n - 1 - first_j, -1)


@lru_cache(maxsize=32)
def pairs(layout: Layout, mask: Mask, travelling: Travelling = "keys") -> Pairs:
    """Returns visible pairs and needed rows for all pairs of ranks of one ring."""
    first, count, step = _pieces(layout)
    ranks, pieces = first.shape
    bounds = np.array(mask.boundaries, np.int64)
    documents = np.stack([bounds[:-1], bounds[1:]], 1)
    documents = documents[documents[:, 0] < documents[:, 1]]
    keys_travel = travelling == "keys"

    # In one document without a window, a rank that needs any key row of another needs the first.
    whole = keys_travel and mask.window is None and len(documents) == 1
    visible = np.zeros((ranks, ranks), np.int64)
    lowest = np.full((ranks, ranks), 0 if whole else layout.padded, np.int64)
    highest = np.full((ranks, ranks), -1, np.int64)
    chunk = max(1, _ELEMENTS_AT_ONCE // (ranks * pieces) ** 2)
    for at in range(0, len(documents), chunk):
        begin, end = documents[at : at + chunk].T[:, :, None, None]
        skipped = np.clip(-((first - begin) // step), 0, count)  # positions before the document
        n = np.clip(-((first - end) // step), 0, count) - skipped
        a = first + skipped * step
        # axes: document, piece of the queries, piece of the keys, query rank, key rank
        qa, qn = (x.swapaxes(1, 2)[:, :, None, :, None] for x in (a, n))
        ka, kn = (x.swapaxes(1, 2)[:, None, :, None, :] for x in (a, n))
        of_piece, begins = (_piece_pairs, ka) if keys_travel else (_mirrored_pairs, qa)
        seen, low_index, high_index = of_piece(mask, step, qa, qn, ka, kn)
        needed = high_index >= low_index
        high = np.where(needed, begins + high_index * step, -1)
        visible += seen.sum((0, 1, 2))
        np.maximum(highest, high.max((0, 1, 2)), out=highest)
        if not whole:
            low = np.where(needed, begins + low_index * step, layout.padded)
            np.minimum(lowest, low.min((0, 1, 2)), out=lowest)
    if not keys_travel:
        visible, lowest, highest = visible.T, lowest.T, highest.T

    def local_row(position: Ints) -> Ints:
        """Counts the local rows of the owner before ``position``."""
        before = -((first - position[:, :, None]) // step)
        rows: Ints = np.clip(before, 0, count).sum(-1)
        return rows

    some = highest >= 0
    first_row = lowest if whole else np.where(some, local_row(np.where(some, lowest, 0)), 0)
    return Pairs(visible, first_row, np.where(some, local_row(highest) + 1, 0))


def total_visible(mask: Mask) -> int:
    """Returns the visible (query, key) pairs of the whole sequence, the same in every partition."""
    total = 0
    for begin, end in itertools.pairwise(mask.boundaries):
        n = end - begin
        if not mask.causal:
            total += n * n
        else:
            span = n if mask.window is None else min(mask.window + 1, n)
            total += span * (span + 1) // 2 + (n - span) * span
    return total


def document_boundaries(seq_len: int, count: int) -> tuple[int, ...]:
    """Returns boundaries of ``count`` packed documents of fixed, uneven lengths.

    Lengths repeat 1 : 2 : 3 (so neighbours differ and few divide a ring evenly), scaled to
    ``seq_len`` tokens; more documents than tokens leave some empty.
    """
    weights = [1 + i % 3 for i in range(count)]
    total, running, bounds = sum(weights), 0, [0]
    for weight in weights:
        running += weight
        bounds.append(seq_len * running // total)
    return tuple(bounds)
