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
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.base.errors import unknown
from ringray.traffic import geometry
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask
from ringray.traffic.routes import KEPT, Route, back

Ints = NDArray[np.signedinteger]
Hulls = tuple[Ints, Ints]
Number = Any  # an integer, or of several problems an array of one of each


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

    chunk: Number
    sums: Number


class Sent(NamedTuple):
    """Traffic of all ranks in one pass: rows of chunks and of sums, and messages of each (the
    tensors for the same rows count as one)."""

    chunk_rows: Number
    sum_rows: Number
    chunks: Number
    sums: Number

    def bytes(self, weights: Weights) -> Number:
        """Returns the payload of all ranks together."""
        return self.chunk_rows * weights.chunk + self.sum_rows * weights.sums

    @property
    def messages(self) -> Number:
        """Returns the messages of both."""
        return self.chunks + self.sums


@dataclass(frozen=True, eq=False)
class Traffic:
    """Hulls by part, owner and visit of one route; an empty hull has ``stop <= start``. Several
    problems have the last axis.

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
        rows[:, :, 0] = 0
        for lane in self.route.lanes:
            if lane.source == KEPT:
                rows[:, :, lane.first] = 0
        return rows

    @cached_property
    def sum_rows(self) -> Ints:
        """Returns rows of sums that leave, ``[part, owner, visit]``: onwards, or home after the
        last need."""
        rows = np.maximum(self.sums[1] - self.sums[0], 0)
        rows[:, :, 0] = 0
        return np.where(self.later[1] > self.later[0], rows, 0)

    @cached_property
    def sums_to(self) -> Ints:
        """Returns ``[part, owner, visit]``: the rank that receives the sum that leaves a visit: the
        next of the lane if it needs rows, else the owner."""
        onward = self.later[1] > self.later[0]
        rank = self.route.rank.reshape(*self.route.rank.shape, *(1 for _ in onward.shape[3:]))
        own = np.arange(self.route.ranks, dtype=np.int32).reshape(-1, *(1 for _ in rank.shape[1:]))
        to = np.broadcast_to(own, onward.shape).copy()
        for lane in self.route.lanes:
            here, following = slice(lane.first, lane.stop - 1), slice(lane.first + 1, lane.stop)
            to[:, :, here] = np.where(onward[:, :, following], rank[:, following], to[:, :, here])
        return to

    def steps(self, which: Pass) -> Number:
        """Counts the steps of one pass: one more than the route has, if sums leave at its end."""
        steps = max(self.route.step) + 1
        if which == "forward":
            return steps
        last = np.array(self.route.step) == steps - 1
        return steps + self.sum_rows[:, :, last].any((0, 1, 2))

    def sent(self, which: Pass) -> Sent:
        """Counts one pass: only a backward pass sends sums."""
        both = self._sent
        return Sent(both.chunk_rows, 0, both.chunks, 0) if which == "forward" else both

    @cached_property
    def _sent(self) -> Sent:
        tables, axes = (self.chunk_rows, self.sum_rows), (0, 1, 2)
        rows = (exact(x.sum(axes)) for x in tables)
        return Sent(*rows, *(exact(np.count_nonzero(x, axes)) for x in tables))

    def of(self, problems: Ints) -> Traffic:
        """Returns the traffic of some of several problems, by their numbers."""
        if np.array_equal(problems, np.arange(self.visible.shape[-1])):
            return self
        pairs = (self.need, self.held, self.later, self.sums)
        return Traffic(
            self.route, self.visible[..., problems],
            *((low[..., problems], high[..., problems]) for low, high in pairs),
        )  # fmt: skip


def exact(total: Number) -> Number:
    """Returns an array of integers of Python, which do not overflow; of no axis, one."""
    return np.asarray(total).astype(object)[()]


def traffic(layout: Layout, mask: Mask, route: Route, travelling: geometry.Travelling) -> Traffic:
    """Returns all hulls of one route."""
    return _walked(route, geometry.pairs(layout, mask, travelling))


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
    return Traffic(route, route.by_visit(pairs.visible[None])[0], (first, stop), held, later, sums)


@dataclass(frozen=True)
class Costs:
    """Bytes of one row: of K/V in the forward pass, and of each walk in the backward pass.
    ``tensors``: of a chunk in the forward pass."""

    forward: Weights
    planned: Weights
    query_side: Weights
    tensors: int = 2

    def of(self, problems: Ints) -> Costs:
        """Returns those of some of several problems, by their numbers."""
        shape, walks = np.shape(self.forward.chunk), (self.forward, self.planned, self.query_side)
        some = [Weights(*(np.broadcast_to(x, shape)[problems] for x in one)) for one in walks]
        return Costs(some[0], some[1], some[2], self.tensors)


def costs(
    itemsize: int, batch: Number, heads: Number, kv_heads: Number, head_dim: int,
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

    def tensors(self, which: Pass) -> Number:
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

    there = [traffic(layout, mask, route, "keys") for route in routes]
    if backward == "reverse":
        ways = _ways_back(there, layout, mask)
        pair = min(ways, key=lambda way: _there(way[0], weights) + _back(way[1], backward, weights))
        return Walks(*pair, "keys", weights)
    afresh, travelling = there, _travelling(backward)
    if travelling == "queries":
        afresh = [traffic(layout, mask, route, travelling) for route in routes]
    best = min(afresh, key=lambda moved: _back(moved, backward, weights))
    return Walks(min(there, key=lambda moved: _there(moved, weights)), best, travelling, weights)


def choose_for_all(
    problems: geometry.Problems, routes: tuple[Route, ...], backward: Backward, weights: Costs
) -> list[tuple[Ints, Walks]]:
    """Returns what ``choose`` does, ``reverse`` excepted, for problems that agree in
    ``geometry.shape``: groups of their numbers, whose passes have as many steps, each with its
    walks, which have an axis of problems then. ``weights`` are arrays."""
    different = {one: i for i, one in enumerate(dict.fromkeys(problems))}
    at = np.array([different[one] for one in problems])
    travelling = _travelling(backward)
    there = [one.of(at) for one in _of_all(tuple(different), routes, "keys")]
    afresh = there
    if travelling == "queries":
        afresh = [one.of(at) for one in _of_all(tuple(different), routes, travelling)]
    forward = np.argmin([_there(moved, weights) for moved in there], 0)
    back = np.argmin([_back(moved, backward, weights) for moved in afresh], 0)
    steps = np.choose(back, [moved.steps("backward") for moved in afresh])
    alike: dict[tuple[int, int, int], list[int]] = {}
    for i, kind in enumerate(zip(forward.tolist(), back.tolist(), steps.tolist(), strict=True)):
        alike.setdefault(kind, []).append(i)
    groups = []
    for (one, other, _), members in alike.items():
        some = np.array(members)
        walks = Walks(there[one].of(some), afresh[other].of(some), travelling, weights.of(some))
        groups.append((some, walks))
    return groups


@lru_cache(maxsize=4)
def _of_all(
    problems: geometry.Problems, routes: tuple[Route, ...], travelling: geometry.Travelling
) -> list[Traffic]:
    pairs = geometry.of_all(problems, travelling)
    return [_walked(route, pairs) for route in routes]


def _travelling(backward: Backward) -> geometry.Travelling:
    return "queries" if backward == "query-side" else "keys"


def _there(moved: Traffic, weights: Costs) -> Number:
    """Returns the bytes of a forward pass."""
    return moved.sent("forward").bytes(weights.forward)


def _back(moved: Traffic, backward: Backward, weights: Costs) -> Number:
    """Returns the bytes of a backward pass."""
    each = weights.query_side if backward == "query-side" else weights.planned
    return moved.sent("backward").bytes(each)


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
