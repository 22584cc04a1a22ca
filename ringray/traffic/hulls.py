"""Hulls: the rows of each message on one route, its sender and its receiver.

Each message carries only the hull of the rows that some rank further on still needs. Sums of
gradients grow along a lane and go home from its last rank. Imports numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.traffic import geometry
from ringray.traffic.by_area import Runs
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask
from ringray.traffic.routes import KEPT, Route

Ints = NDArray[np.signedinteger]
Hulls = tuple[Ints, Ints]
Pass = Literal["forward", "backward"]

_NONE = np.iinfo(np.int32).max


class Weights(NamedTuple):
    """Bytes of one travelling row: of a chunk, and of the sum of its gradients."""

    chunk: int
    sums: int


class Sent(NamedTuple):
    """Traffic of all ranks in one pass: rows of chunks and of sums, and messages of each (the
    tensors for the same rows count as one)."""

    chunk_rows: int
    sum_rows: int
    chunks: int
    sums: int

    def bytes(self, weights: Weights) -> int:
        """Returns the payload of all ranks together."""
        return self.chunk_rows * weights.chunk + self.sum_rows * weights.sums

    @property
    def messages(self) -> int:
        """Returns the messages of both."""
        return self.chunks + self.sums


@dataclass(frozen=True, eq=False)
class Traffic:
    """Hulls by part, owner and visit of one route; an empty hull has ``stop <= start``.

    ``need``: rows that the rank of the visit computes with. ``held``: rows that it has: the hull of
    all needs from there on, other lanes that start there included. ``later``: the same within its
    lane. ``sums``: rows of the sum of gradients when it leaves the visit. ``runs``: where each
    owner sends straight to each rank, the needed rows instead of their hulls.
    """

    route: Route
    visible: Ints
    need: Hulls
    held: Hulls
    later: Hulls
    sums: Hulls
    runs: Runs | None = None

    def rows(self, hulls: Hulls) -> Ints:
        """Counts the rows in hulls, ``[part, owner, visit]``, or in the runs within these."""
        rows: Ints = np.maximum(hulls[1] - hulls[0], 0)
        if self.runs is not None:
            needed = self.route.by_visit(self.runs.rows[None])
            rows[:, :, 1:] = np.where(rows[:, :, 1:] > 0, needed[:, :, 1:], 0)
        return rows

    @cached_property
    def chunk_rows(self) -> Ints:
        """Returns rows of chunks that arrive, ``[part, owner, visit]``; 0 where the rank has kept
        them."""
        rows = self.rows(self.held)
        rows[:, :, 0] = 0
        for lane in self.route.lanes:
            if lane.source == KEPT:
                rows[:, :, lane.first] = 0
        return rows

    @cached_property
    def sum_rows(self) -> Ints:
        """Returns rows of sums that leave, ``[part, owner, visit]``: onwards, or home after the
        last need."""
        rows = self.rows(self.sums)
        rows[:, :, 0] = 0
        return np.where(self.later[1] > self.later[0], rows, 0)

    @cached_property
    def sums_to(self) -> Ints:
        """Returns ``[part, owner, visit]``: the rank that receives the sum that leaves a visit: the
        next of the lane if it needs rows, else the owner."""
        onward = self.later[1] > self.later[0]
        rank = self.route.rank
        own = np.arange(self.route.ranks, dtype=np.int32)[:, None]
        to = np.broadcast_to(own, onward.shape).copy()
        for lane in self.route.lanes:
            here, following = slice(lane.first, lane.stop - 1), slice(lane.first + 1, lane.stop)
            to[:, :, here] = np.where(onward[:, :, following], rank[:, following], to[:, :, here])
        return to

    def steps(self, which: Pass) -> int:
        """Counts the steps of one pass: one more than the route has, if sums leave at its end."""
        steps = max(self.route.step) + 1
        if which == "forward":
            return steps
        last = np.array(self.route.step) == steps - 1
        return steps + bool(self.sum_rows[:, :, last].any())

    def sent(self, which: Pass) -> Sent:
        """Counts one pass: only a backward pass sends sums."""
        both = self._sent
        return Sent(both.chunk_rows, 0, both.chunks, 0) if which == "forward" else both

    @cached_property
    def _sent(self) -> Sent:
        tables = self.chunk_rows, self.sum_rows
        # Integers of Python, because the bytes of all these rows may exceed 64 bits.
        rows = (int(x.sum()) for x in tables)
        return Sent(*rows, *(int(np.count_nonzero(x)) for x in tables))


def traffic(layout: Layout, mask: Mask, route: Route, travelling: geometry.Travelling) -> Traffic:
    """Returns all hulls of one route."""
    pairs = geometry.pairs(layout, mask, travelling)
    # A rank's own rows stay together, so queries that travel go with those between.
    straight = route.straight and travelling == "keys"
    return _walked(route, pairs if straight else pairs._replace(runs=None))


def _walked(route: Route, pairs: geometry.Pairs) -> Traffic:
    first, stop = route.by_visit(pairs.first), route.by_visit(pairs.stop)
    first = np.where(stop > first, first, _NONE)
    held, later, sums = ((first.copy(), stop.copy()) for _ in range(3))
    for lane in reversed(route.lanes):
        forth = slice(None), slice(None), slice(lane.first, lane.stop)
        back = slice(None), slice(None), slice(lane.stop - 1, lane.first - 1, -1)
        for low, high in (held, later):
            np.minimum.accumulate(low[back], 2, out=low[back])
            np.maximum.accumulate(high[back], 2, out=high[back])
        if lane.source > 0:
            low, high = (x[:, :, lane.source] for x in held)
            np.minimum(low, held[0][:, :, lane.first], out=low)
            np.maximum(high, held[1][:, :, lane.first], out=high)
        np.minimum.accumulate(sums[0][forth], 2, out=sums[0][forth])
        np.maximum.accumulate(sums[1][forth], 2, out=sums[1][forth])
    visible = route.by_visit(pairs.visible[None])[0]
    return Traffic(route, visible, (first, stop), held, later, sums, pairs.runs)
