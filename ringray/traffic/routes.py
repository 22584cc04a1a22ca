"""Routes: the ranks that a chunk visits, their order, and the steps of the visits.

A chunk is the rows that one rank owns and others need: of K and V (or, on the query side of a
backward pass, of Q and dO). A route is the same for every owner: ``visits`` number the ranks that a
chunk meets, 0 is its owner, and a table gives the rank of each visit. Visits form lanes: paths
along which the chunk is handed on, and along which the sum of its gradients grows until the last
rank of the lane sends it home. A ring is one lane; a ring in both directions is two; a ring of
rings has one lane per node; where owners send straight to every rank, each visit is a lane of its
own. Imports numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.signedinteger]


KEPT = -1  # the source of a lane whose first rank has kept the chunk since the forward pass


class Lane(NamedTuple):
    """Visits ``first`` to ``stop - 1``, each handing the chunk to the next. ``source``: the visit
    that hands it to the first, or ``KEPT``."""

    source: int
    first: int
    stop: int


@dataclass(frozen=True, eq=False)
class Route:
    """One way around the ring.

    ``table``: makes ``rank`` when it is first needed, as that of a large ring is large. ``step``:
    by visit, the step at which its rank computes with the chunk. ``posted``: by visit, the step at
    which the transfer to it begins; it runs beside the steps between and ends before ``step``.
    """

    name: str
    table: Callable[[], Ints]
    lanes: tuple[Lane, ...]
    step: tuple[int, ...]
    posted: tuple[int, ...]

    @cached_property
    def rank(self) -> Ints:
        """Returns ``[owner, visit]``: the rank of a visit."""
        rank = self.table()
        rank.flags.writeable = False  # routes are cached
        return rank

    @property
    def ranks(self) -> int:
        """Returns the number of ranks of the ring."""
        return len(self.step)  # a chunk visits each once

    @property
    def straight(self) -> bool:
        """Returns whether no rank hands a chunk on: it comes from its owner, or was kept."""
        return all(x.source in (0, KEPT) and x.stop - x.first == 1 for x in self.lanes)

    @cached_property
    def owner(self) -> Ints:
        """Returns ``[rank, visit]``: the owner of the chunk that a rank meets at a visit."""
        return np.argsort(self.rank, axis=0)

    @cached_property
    def _flat_pairs(self) -> Ints:
        return self.rank * self.ranks + np.arange(self.ranks)[:, None]

    def by_visit(self, table: Ints) -> Ints:
        """Reorders ``[part, visiting rank, owner]`` to ``[part, owner, visit]``."""
        return np.take(table.reshape(len(table), -1), self._flat_pairs, 1)

    @cached_property
    def _flat(self) -> Ints:
        return self.owner * len(self.step) + np.arange(len(self.step))

    def by_rank(self, table: Ints) -> Ints:
        """Reorders ``[owner, visit]`` to ``[rank, visit]``: a rank meets one chunk at each
        visit."""
        return np.take(table, self._flat)

    @cached_property
    def source(self) -> Ints:
        """Returns, by visit, the visit that hands the chunk to it; 0 for visit 0 and kept
        chunks."""
        source = np.maximum(np.arange(len(self.step)) - 1, 0)
        for lane in self.lanes:
            source[lane.first] = max(lane.source, 0)
        return source

    @cached_property
    def handed_by(self) -> Ints:
        """Returns ``[owner, visit]``: the rank that hands the chunk to a visit; without meaning for
        visit 0 and the first of a kept lane."""
        return self.rank[:, self.source]


@lru_cache(maxsize=64)
def both_ways(ranks: int, up: int) -> Route:
    """Returns the ring in both directions at once: ``up`` visits toward higher ranks, the others
    toward lower ones, in as many steps as the longer way has."""
    hops = [0, *range(1, up + 1), *(-hop for hop in range(1, ranks - up))]
    steps = tuple(abs(hop) for hop in hops)
    lanes = _lanes((0, 1, up + 1), (0, up + 1, ranks))
    one_way = {0: "toward lower ranks", ranks - 1: "toward higher ranks"}
    name = one_way.get(up, f"{up} up, {ranks - 1 - up} down")
    return Route(name, partial(_hopping, ranks, hops), lanes, steps, _just_before(steps))


def around(ranks: int, direction: int) -> Route:
    """Returns the ring: from neighbour to neighbour, toward higher (+1) or lower (-1) ranks."""
    return both_ways(ranks, ranks - 1 if direction > 0 else 0)


@lru_cache(maxsize=64)
def ring_of_rings(ranks: int, node: int, outer: int, inner: int) -> Route:
    """Returns a ring in each node of ``node`` consecutive ranks, and one across nodes between ranks
    of equal place; its transfers may take as long as a whole inner ring. Directions are as in
    ``around``."""

    def table() -> Ints:
        far, near = np.divmod(np.arange(ranks), node)
        node_of = np.add.outer(far, outer * far) % (ranks // node)
        place = np.add.outer(near, inner * near) % node
        return node_of * node + place

    posted = (0, *(step - (1 if step % node else node) for step in range(1, ranks)))
    lanes = [(entry - node, entry, entry + node) for entry in range(node, ranks, node)]
    name = f"nodes {outer:+d}, within {inner:+d}"
    return Route(name, table, _lanes((0, 1, node), *lanes), tuple(range(ranks)), posted)


@lru_cache(maxsize=64)
def straight(ranks: int) -> Route:
    """Returns the route on which each owner sends to all ranks directly, at one step."""
    lanes = _lanes(*((0, visit, visit + 1) for visit in range(1, ranks)))
    table = partial(_hopping, ranks, range(ranks))
    return Route("straight", table, lanes, (0,) + (1,) * (ranks - 1), (0,) * ranks)


@lru_cache(maxsize=64)
def rotations(ranks: int) -> Route:
    """Returns the route on which each owner sends to all ranks directly: at step s to the ranks s
    up and s down, so that each rank sends to two and receives from two (of an even number of ranks
    the farthest is both, and comes once)."""
    hops, steps = [0], [0]
    for step in range(1, ranks // 2 + 1):
        both = {step, ranks - step}
        hops += sorted(both)
        steps += [step] * len(both)
    lanes = straight(ranks).lanes
    table = partial(_hopping, ranks, hops)
    return Route("rotations", table, lanes, tuple(steps), _just_before(steps))


@lru_cache(maxsize=64)
def back(route: Route) -> Route | None:
    """Returns the same lanes and steps walked back from their last ranks, which have kept the
    chunk; its owner comes last. None where a lane does not begin at the owner."""
    if any(lane.source != 0 for lane in route.lanes):
        return None
    visits, lanes = [0], []
    for lane in route.lanes:
        lanes.append((KEPT, len(visits), len(visits) + lane.stop - lane.first))
        visits += range(lane.stop - 1, lane.first - 1, -1)
    last = max(route.step)
    steps = tuple(last - route.step[visit] for visit in visits)
    return Route(
        f"back {route.name}",
        lambda: route.rank[:, visits],
        _lanes(*lanes),
        steps,
        _just_before(steps),
    )


def _hopping(ranks: int, hops: Sequence[int]) -> Ints:
    """Returns ``[owner, visit]``, the rank so many hops from the owner."""
    return (np.add.outer(np.arange(ranks), hops) % ranks).astype(np.int32)


def _lanes(*lanes: tuple[int, int, int]) -> tuple[Lane, ...]:
    return tuple(Lane(*lane) for lane in lanes if lane[1] < lane[2])


def _just_before(steps: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(0, step - 1) for step in steps)
