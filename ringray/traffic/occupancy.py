"""What each rank has at each step of a walk, in rows: chunks, sums of gradients, and what arrives.

A chunk is there from the step at which its transfer begins until it has been computed with, a
packed copy until it has been sent, a sum of gradients from when it is made until it has left.
Imports numpy only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ringray.traffic.routes import Route
    from ringray.traffic.walk import Traffic

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


@lru_cache(maxsize=256)
def _under_way(route: Route) -> tuple[Floats, Floats] | None:
    """``[visit, step]``, 0 or 1: a chunk on its way or at hand, and a copy that is being sent. None
    where each transfer takes one step, the one before its chunk is computed with."""
    if route.posted == tuple(max(0, step - 1) for step in route.step):
        return None
    step, posted = np.array(route.step)[:, None], np.array(route.posted)[:, None]
    t = np.arange(max(route.step) + 2)[None, :]
    chunk, packed = (posted <= t) & (t <= step), (posted <= t) & (t < step)
    return chunk.astype(np.float64), packed.astype(np.float64)


def at_steps(values: Ints | Floats, route: Route) -> Floats:
    """``[rank, visit]`` summed to ``[rank, step]``, with a step more at the end."""
    placed = np.zeros((len(values), max(route.step) + 2))
    if route.steps_in_order:
        placed[:, : len(route.step)] = values
    elif route.steps_differ:
        placed[:, route.step] = values
    else:
        for visit, step in enumerate(route.step):
            placed[:, step] += values[:, visit]
    return placed


def _before(placed: Floats) -> Floats:
    """Everything one step earlier."""
    earlier = np.zeros_like(placed)
    earlier[:, :-1] = placed[:, 1:]
    return earlier


def _after(placed: Floats) -> Floats:
    """Everything one step later."""
    later = np.zeros_like(placed)
    later[:, 1:] = placed[:, :-1]
    return later


class Walked(NamedTuple):
    """Rows beside a rank's own at each step of a pass, ``[rank, step]``: of chunks, and of sums;
    and the visible pairs that it computes there, and the rows that arrive by its end."""

    chunks: Floats
    sums: Floats
    visible: Floats
    chunks_in: Floats
    sums_in: Floats


def walked(moved: Traffic, shard: int, *, backward: bool) -> Walked:
    """All steps of one pass, the sums' way home included."""
    route = moved.route
    arrive = moved.chunk_rows
    received = route.by_rank(arrive)
    # As the source of a visit, a rank sends what the visit holds, and packs it if it holds more.
    sent, _ = route.handed_on(arrive)
    holds = np.maximum(moved.held[1] - moved.held[0], 0)
    holds[:, 0] = shard
    _, has = route.handed_on(holds)
    packed = np.where(sent < has, sent, 0)
    under_way = _under_way(route)
    placed = at_steps(received, route)
    chunks_in = _before(placed)
    if under_way is None:
        chunks = placed + _before(at_steps(received + packed, route))
    else:
        chunks = received.astype(np.float64) @ under_way[0] + packed @ under_way[1]
    visible = at_steps(route.by_rank(moved.visible), route)
    if not backward:
        return Walked(chunks, np.zeros_like(chunks), visible, chunks_in, np.zeros_like(chunks))
    leave = moved.sum_rows
    alive = moved.later[1] > moved.later[0]
    after = np.zeros_like(leave)  # what the sum of the visit before brings to a visit
    ends = alive.copy()
    for lane in route.lanes:
        inside = slice(lane.first + 1, lane.stop)
        before = slice(lane.first, lane.stop - 1)
        after[:, inside] = np.where(alive[:, inside], leave[:, before], 0)
        ends[:, before] &= ~alive[:, inside]
    home = np.where(ends, leave, 0)  # by owner, which is the rank that receives it
    home[:, 0] = 0
    made = at_steps(route.by_rank(leave), route)  # lives until it has left, one step later
    coming = at_steps(route.by_rank(after), route) + _after(at_steps(home, route))
    return Walked(chunks, made + _after(made) + coming, visible, chunks_in, coming)
