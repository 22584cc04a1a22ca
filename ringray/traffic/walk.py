"""Walks: the rows of each message, its sender, its receiver and its step.

A chunk walks a route (``routes``), and each message carries only the hull of the rows that some
rank further on still needs. Sums of gradients grow along a lane and go home from its last rank. The
planner counts these messages and the ring sends them: both read the same tables. Imports numpy
only.

Walks of a backward pass: ``planned`` lets K/V walk afresh from their owner, followed by the sums of
dK/dV. ``reverse`` walks back from the ranks that received K/V last, which have kept them.
``query-side`` lets Q, dO, lse and delta walk, followed by the sum of dQ, while K/V and dK/dV stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.base.errors import unknown
from ringray.traffic import geometry
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask
from ringray.traffic.routes import KEPT, Route, back

Ints = NDArray[np.signedinteger]
Hulls = tuple[Ints, Ints]


Pass = Literal["forward", "backward"]
Backward = Literal["planned", "reverse", "query-side"]
BACKWARDS: tuple[Backward, ...] = ("planned", "reverse", "query-side")

FP32 = 4  # bytes
_NONE = np.iinfo(np.int32).max


class Rows(NamedTuple):
    """A half-open range of local rows of a chunk's owner; empty when ``stop <= start``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Returns the number of rows."""
        return max(0, self.stop - self.start)

    def __bool__(self) -> bool:
        return self.stop > self.start


NO_ROWS = Rows(0, 0)


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
    lane. ``sums``: rows of the sum of gradients when it leaves the visit.
    """

    route: Route
    visible: Ints
    need: Hulls
    held: Hulls
    later: Hulls
    sums: Hulls

    @cached_property
    def chunk_rows(self) -> Ints:
        """Returns rows of chunks that arrive, ``[part, owner, visit]``; 0 where the rank has kept
        them."""
        rows = np.maximum(self.held[1] - self.held[0], 0)
        rows[..., 0] = 0
        for lane in self.route.lanes:
            if lane.source == KEPT:
                rows[..., lane.first] = 0
        return rows

    @cached_property
    def sum_rows(self) -> Ints:
        """Returns rows of sums that leave, ``[part, owner, visit]``: onwards, or home after the
        last need."""
        rows = np.maximum(self.sums[1] - self.sums[0], 0)
        rows[..., 0] = 0
        return np.where(self.later[1] > self.later[0], rows, 0)

    @cached_property
    def sums_to(self) -> Ints:
        """Returns ``[part, owner, visit]``: the rank that receives the sum that leaves a visit: the
        next of the lane if it needs rows, else the owner."""
        onward = self.later[1] > self.later[0]
        own = np.arange(self.route.ranks, dtype=np.int32)[:, None]
        to = np.broadcast_to(own, onward.shape).copy()
        for lane in self.route.lanes:
            here, following = slice(lane.first, lane.stop - 1), slice(lane.first + 1, lane.stop)
            next_rank = self.route.rank[:, following]
            to[..., here] = np.where(onward[..., following], next_rank, to[..., here])
        return to

    def sent(self, which: Pass) -> Sent:
        """Counts one pass: only a backward pass sends sums."""
        both = self._sent
        return Sent(both.chunk_rows, 0, both.chunks, 0) if which == "forward" else both

    @cached_property
    def _sent(self) -> Sent:
        tables = (self.chunk_rows, self.sum_rows)
        return Sent(*(int(x.sum()) for x in tables), *(int(np.count_nonzero(x)) for x in tables))


def traffic(layout: Layout, mask: Mask, route: Route, travelling: geometry.Travelling) -> Traffic:
    """Returns all hulls of one route."""
    pairs = geometry.pairs(layout, mask, travelling)
    first, stop = route.by_visit(pairs.first), route.by_visit(pairs.stop)
    first = np.where(stop > first, first, _NONE)
    held, later, sums = ((first.copy(), stop.copy()) for _ in range(3))
    for lane in reversed(route.lanes):
        visits = slice(lane.first, lane.stop)
        for low, high in (held, later):
            low[..., visits] = np.minimum.accumulate(low[..., visits][..., ::-1], -1)[..., ::-1]
            high[..., visits] = np.maximum.accumulate(high[..., visits][..., ::-1], -1)[..., ::-1]
        if lane.source > 0:
            low, high = (x[..., lane.source] for x in held)
            np.minimum(low, held[0][..., lane.first], out=low)
            np.maximum(high, held[1][..., lane.first], out=high)
        sums[0][..., visits] = np.minimum.accumulate(sums[0][..., visits], -1)
        sums[1][..., visits] = np.maximum.accumulate(sums[1][..., visits], -1)
    return Traffic(route, route.by_visit(pairs.visible), (first, stop), held, later, sums)


@dataclass(frozen=True)
class Costs:
    """Bytes of one row: of K/V in the forward pass, and of each walk in the backward pass.
    ``tensors``: of a chunk in the forward pass."""

    forward: Weights
    planned: Weights
    query_side: Weights
    tensors: int = 2


def costs(
    itemsize: int, batch: int, heads: int, kv_heads: int, head_dim: int,
    value_dim: int | None = None, *, quantized: bool = False,
) -> Costs:  # fmt: skip
    """Returns the bytes of a row (one position, all heads of the batch). Gradients travel in fp32,
    as do lse and delta. ``value_dim``: head dim of V and dO; None is ``head_dim``. ``quantized``: K
    and V travel in a byte per element, with a scale in fp32 per row and head."""
    value_dim = head_dim if value_dim is None else value_dim
    keys = batch * kv_heads * (head_dim + value_dim)
    queries, results = batch * heads * head_dim, batch * heads * value_dim
    return Costs(
        forward=Weights(keys + 2 * batch * kv_heads * FP32 if quantized else keys * itemsize, 0),
        planned=Weights(keys * itemsize, keys * FP32),
        query_side=Weights(
            (queries + results) * itemsize + 2 * batch * heads * FP32, queries * FP32
        ),
        tensors=4 if quantized else 2,
    )


class Walks(NamedTuple):
    """The traffic of both passes. ``travelling``: the operands that walk in the backward pass."""

    forward: Traffic
    backward: Traffic
    travelling: geometry.Travelling
    weights: Costs

    def tensors(self, which: Pass) -> int:
        """Counts the tensors that all ranks send in one pass: K and V (and their scales), or Q, dO,
        lse and delta, of a chunk; dK and dV, or dQ, of a sum."""
        sent = (self.forward if which == "forward" else self.backward).sent(which)
        if which == "forward":
            return self.weights.tensors * sent.messages
        if self.travelling == "keys":
            return 2 * sent.messages
        return 4 * sent.chunks + sent.sums

    @property
    def backward_weights(self) -> Weights:
        """Returns the bytes of one row in the backward pass."""
        keys = self.travelling == "keys"
        return self.weights.planned if keys else self.weights.query_side


class Unwalkable(ValueError):
    """The forward pass or the transport makes a backward walk impossible."""


def resolve_backward(name: str, transport: str, *, walks: bool) -> Backward:
    """Returns the walk for ``auto`` or a name of ``BACKWARDS``.

    ``walks``: the transport has chunks that walk.

    Raises:
        Unwalkable: ``transport`` has only one way back.
        ValueError: unknown walk.
    """
    chosen = "planned" if name == "auto" else name
    if chosen not in BACKWARDS:
        raise ValueError(unknown("backward", name, ("auto", *BACKWARDS)))
    if not walks and chosen != "planned":
        raise Unwalkable(
            f"backward: got {name!r}, but with transport {transport!r} nothing walks; take "
            "'planned'"
        )
    return chosen


@lru_cache(maxsize=32)  # of a large ring each takes a GB
def choose(
    layout: Layout, mask: Mask, routes: tuple[Route, ...], backward: Backward, weights: Costs
) -> Walks:
    """Returns the routes that send fewest bytes. On a tie the first one wins, so that every rank
    and the planner choose the same.

    Raises:
        Unwalkable: ``reverse``, where on every route the forward pass drops rows that are needed
            on the way back, or would leave a rank with several chunks to keep.
    """

    travelling: geometry.Travelling = "queries" if backward == "query-side" else "keys"
    each = weights.query_side if backward == "query-side" else weights.planned

    def there_costs(moved: Traffic) -> int:
        return moved.sent("forward").bytes(weights.forward)

    def back_costs(moved: Traffic) -> int:
        return moved.sent("backward").bytes(each)

    there = [traffic(layout, mask, route, "keys") for route in routes]
    if backward == "reverse":
        ways = _ways_back(there, layout, mask)
        pair = min(ways, key=lambda way: there_costs(way[0]) + back_costs(way[1]))
        return Walks(*pair, travelling, weights)
    afresh = there
    if travelling == "queries":
        afresh = [traffic(layout, mask, route, travelling) for route in routes]
    return Walks(min(there, key=there_costs), min(afresh, key=back_costs), travelling, weights)


def _ways_back(there: list[Traffic], layout: Layout, mask: Mask) -> list[tuple[Traffic, Traffic]]:
    """Lists the walks that can be walked back, each with its way back; raises Unwalkable if none
    can."""
    found = [(moved, way) for moved in there if (way := _returning(moved, layout, mask))]
    if not found:
        why = (
            f"with partition {layout.partition!r}, this mask and {layout.ranks} ranks the forward "
            "pass has dropped rows by then that are needed on the way back"
        )
        if all(back(moved.route) is None for moved in there):
            why = "this transport hands chunks on in the middle of their way"
        raise Unwalkable(
            "backward walk 'reverse' goes back from the ranks that received K/V last, but "
            f"{why}; take 'planned'"
        )
    return found


def _returning(forward: Traffic, layout: Layout, mask: Mask) -> Traffic | None:
    """Returns the walk back of ``forward``, or None where its last ranks lack rows that it
    needs."""
    route = back(forward.route)
    if route is None:
        return None
    found = traffic(layout, mask, route, "keys")
    for there, lane in zip(forward.route.lanes, route.lanes, strict=True):
        kept = forward.held[0][..., there.stop - 1], forward.held[1][..., there.stop - 1]
        wanted = found.held[0][..., lane.first], found.held[1][..., lane.first]
        # An empty hull starts beyond everything.
        if not bool(((kept[0] <= wanted[0]) & (kept[1] >= wanted[1])).all()):
            return None
    return found
