"""Walks: the cheapest routes of both passes, and the hulls of the messages on them.

A chunk walks a route (``routes``) with the rows of ``hulls``. The planner counts these messages and
the ring sends them: both read the same tables. Imports numpy only.

Walks of a backward pass: ``planned`` lets K/V walk afresh from their owner, followed by the sums of
dK/dV. ``reverse`` walks back from the ranks that received K/V last, which have kept them.
``query-side`` lets Q, dO, lse and delta walk, followed by the sum of dQ, while K/V and dK/dV stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ringray.base.errors import unknown
from ringray.traffic import geometry
from ringray.traffic.geometry import Layout
from ringray.traffic.hulls import Pass, Traffic, Weights, traffic
from ringray.traffic.mask import Mask
from ringray.traffic.routes import Route, back

Backward = Literal["planned", "reverse", "query-side"]
BACKWARDS: tuple[Backward, ...] = ("planned", "reverse", "query-side")

FP32 = 4  # bytes


class Rows(NamedTuple):
    """Local rows of a chunk's owner, half-open; empty when ``stop <= start``. ``runs``: the ranges
    of which they consist, if these are several."""

    start: int
    stop: int
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def parts(self) -> tuple[slice, ...]:
        """Returns the ranges of which they consist."""
        return tuple(slice(*run) for run in self.runs or ((self.start, self.stop),))

    @property
    def size(self) -> int:
        """Returns the number of rows."""
        return sum(max(0, part.stop - part.start) for part in self.parts)

    def __bool__(self) -> bool:
        return self.stop > self.start


NO_ROWS = Rows(0, 0)


@dataclass(frozen=True)
class Costs:
    """Bytes of one row: of K/V in the forward pass, and of each walk in the backward pass.
    ``tensors``: of a chunk in the forward pass."""

    forward: Weights
    planned: Weights
    query_side: Weights
    tensors: int = 2


def costs(
    itemsize: int,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    *,
    quantized: bool = False,
) -> Costs:
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


def _travelling(backward: Backward) -> geometry.Travelling:
    return "queries" if backward == "query-side" else "keys"


def _there(moved: Traffic, weights: Costs) -> int:
    """Returns the bytes of a forward pass."""
    return moved.sent("forward").bytes(weights.forward)


def _back(moved: Traffic, backward: Backward, weights: Costs) -> int:
    """Returns the bytes of a backward pass."""
    each = weights.query_side if backward == "query-side" else weights.planned
    return moved.sent("backward").bytes(each)


def _ways_back(there: list[Traffic], layout: Layout, mask: Mask) -> list[tuple[Traffic, Traffic]]:
    """Lists the walks that can be walked back, each with its way back; raises Unwalkable if none
    can."""
    ways = [(moved, way) for moved in there if (way := _returning(moved, layout, mask))]
    if not ways:
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
    return ways


def _returning(forward: Traffic, layout: Layout, mask: Mask) -> Traffic | None:
    """Returns the walk back of ``forward``, or None where its last ranks lack rows that it
    needs."""
    route = back(forward.route)
    if route is None:
        return None
    returning = traffic(layout, mask, route, "keys")
    for there, lane in zip(forward.route.lanes, route.lanes, strict=True):
        held = forward.held[0][..., there.stop - 1], forward.held[1][..., there.stop - 1]
        wanted = returning.held[0][..., lane.first], returning.held[1][..., lane.first]
        # An empty hull starts beyond everything.
        if not bool(((held[0] <= wanted[0]) & (held[1] >= wanted[1])).all()):
            return None
    return returning
