"""One rank of a ring that is computed on one device, for the kernels' benchmark."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ringray import transport
from ringray.attention.call import Call, Score
from ringray.attention.problem import RankProblem
from ringray.traffic import deal, walk
from ringray.traffic.geometry import Layout
from ringray.traffic.hulls import Pass
from ringray.traffic.mask import Mask
from ringray.tuning.lookup import Strategy


def hops(point: Any, rank: int, backend: str, q: Tensor, k: Tensor) -> tuple[Any, ...]:
    """Lists the computations of one rank, in the order of the ring.

    Args:
        point: the ring: ``partition``, ``seq_len`` (tokens), ``world_size``, ``whole.scale``.
        q: (B, Hq, S, D), the whole sequence.
        k: (B, Hkv, S, D).

    Returns:
        The rank's positions, int64 (S / N,); then for forward and for backward a list of hops: the
        chunk's owner, a slice of its rows, and the range of them that each query sees (start, end).
    """
    batch, heads, _, head_dim = q.shape
    strategy = Strategy(point.partition, backward="planned", backend=backend)
    mask = Mask(point.seq_len)
    partition = deal.resolved(point.partition, mask, point.world_size)
    problem = RankProblem(
        call=Call(mask, Score(point.whole.scale), strategy),
        layout=Layout(partition, point.seq_len, point.world_size),
        rank=rank,
        exchange=transport.plan(transport.DEFAULT, point.world_size, heads, k.shape[1]),
        costs=walk.costs(q.element_size(), batch, heads, k.shape[1], head_dim),
    )

    def visits(which: Pass) -> list[tuple[int, slice, Tensor, Tensor]]:
        # The first hop sets the state, and so is made even where nothing is needed.
        needed = [
            (visit.owner, visit.need or visit.held)
            for i, visit in enumerate(problem.script(which).visits)
            if visit.need or (i == 0 and which == "forward")
        ]
        own, device = problem.own, q.device
        return [
            (owner, rows.parts[0], *problem.intervals(rank, own, owner, rows, device)[0])
            for owner, rows in needed
        ]

    return problem.positions_at(rank, problem.own, q.device), visits("forward"), visits("backward")
