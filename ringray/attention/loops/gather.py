"""A few heads at a time with the keys of all ranks: while one group of K/V heads is computed, the
next is gathered. Rows are put in the order of their positions, so each query meets all its keys in
one call and nothing is merged. In backward each rank's share of dK/dV goes straight to its owner,
which adds the shares in the order of ranks.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import ringray_kernels
from ringray.attention.loops.chunks import Chunk, ChunkShape, Result
from ringray.comm.ring import Batch
from ringray.traffic.walk import Rows

if TYPE_CHECKING:
    from ringray.attention.problem import RankProblem
    from ringray.comm.ring import Comm, Pending


@dataclass(frozen=True)
class _Plan:
    """What this rank gathers and gives, and where what it gathers stands in order.

    ``wanted``: rows of each owner, this rank's own among them. ``given``: own rows by the rank that
    wants them. ``place``: by owner, where its rows stand. ``start``, ``end``: int32 (1, S), which
    of all of them a query sees.
    """

    wanted: dict[int, Rows]
    given: dict[int, Rows]
    place: dict[int, Tensor]
    start: Tensor
    end: Tensor

    @property
    def rows(self) -> int:
        return sum(rows.size for rows in self.wanted.values())


def _plan(problem: RankProblem, device: torch.device) -> _Plan:
    script = problem.script("forward")
    given = {m.peer: m.rows for step in script.steps for m in step.messages if m.send and m.chunk}
    wanted = {visit.owner: visit.need or visit.held for visit in script.visits}
    at = {
        owner: problem.positions(owner, device)[rows.start : rows.stop]
        for owner, rows in wanted.items()
    }
    order = torch.cat(list(at.values())).sort().values
    place = {owner: torch.searchsorted(order, positions) for owner, positions in at.items()}
    start, end = problem.intervals_of(problem.rank, problem.own, order)
    return _Plan(wanted, given, place, start, end)


class _Group:
    """Some K/V heads from ``at`` on, which are computed with at one ``step``, and the query heads
    that share them."""

    def __init__(self, step: int, at: int, q: Tensor, k: Tensor, count: int) -> None:
        self.step = step
        share = q.shape[1] // k.shape[1]
        stop = min(at + count, k.shape[1])
        self.kv_heads = slice(at, stop)
        self.heads = slice(at * share, stop * share)
        self.label = f"K/V heads {at} to {stop - 1}" if stop - at > 1 else f"K/V head {at}"


def _groups(q: Tensor, k: Tensor, problem: RankProblem) -> list[_Group]:
    count = problem.exchange.heads_at_once
    assert count is not None
    starts = range(0, k.shape[1], count)
    return [_Group(step, at, q, k, count) for step, at in enumerate(starts)]


class _Gather:
    """One group's K and V on their way from all ranks."""

    def __init__(
        self, k: Tensor, v: Tensor, group: _Group, plan: _Plan, problem: RankProblem, comm: Comm
    ) -> None:
        k, v = k[:, group.kv_heads], v[:, group.kv_heads]
        self._plan, self._own = plan, Chunk((k, v), problem.own)
        # It travels while the group before it is computed with.
        hop = comm.hop(f"step {group.step - 1}" if group.step else "start")
        kind, batch = ChunkShape((k, v)), Batch(hop, f"{group.label} of all")
        self._parts = {
            owner: kind.empty(rows) for owner, rows in plan.wanted.items() if owner != problem.rank
        }
        for peer, rows in plan.given.items():
            for x in self._own.cut(rows):
                batch.send(x.contiguous(), peer)
        for owner, part in self._parts.items():
            for x in part.tensors:
                batch.receive(x, owner)
        self._rank = problem.rank
        self._pending: Pending = comm.post(batch)

    def wait(self) -> tuple[Tensor, Tensor]:
        """K and V of the gathered rows, in the order of their positions."""
        self._pending.wait()
        mine = self._plan.wanted[self._rank]
        self._parts[self._rank] = Chunk(self._own.cut(mine), mine)
        k, v = ChunkShape(self._own.tensors).empty(Rows(0, self._plan.rows)).tensors
        for owner, part in self._parts.items():
            for into, x in zip((k, v), part.tensors, strict=True):
                into.index_copy_(2, self._plan.place[owner], x)
        self._parts.clear()
        return k, v


class _Scatter:
    """One group's dK and dV on their way to their owners."""

    def __init__(
        self, dk: Tensor, dv: Tensor, group: _Group, plan: _Plan, problem: RankProblem, comm: Comm
    ) -> None:
        hop = comm.hop(f"step {group.step + 1}")  # the step of the group after it
        kind, batch = ChunkShape((dk, dv)), Batch(hop, f"sums of {group.label}")
        for owner, place in plan.place.items():
            if owner != problem.rank:
                for x in (dk, dv):
                    batch.send(x.index_select(2, place), owner)
        self._shares = {peer: kind.empty(rows) for peer, rows in plan.given.items()}
        for peer, share in self._shares.items():
            for x in share.tensors:
                batch.receive(x, peer)
        own = plan.place[problem.rank]
        mine = Chunk((dk.index_select(2, own), dv.index_select(2, own)), plan.wanted[problem.rank])
        self._shares[problem.rank] = mine
        self._pending: Pending = comm.post(batch)

    def wait(self, home: Chunk) -> None:
        """Add all shares to ``home``."""
        self._pending.wait()
        for rank in sorted(self._shares):
            home.add(self._shares.pop(rank))


def forward(q: Tensor, k: Tensor, v: Tensor, problem: RankProblem, comm: Comm) -> Result:
    """This rank's output over the keys of all ranks. Saved: q, k, v, out, lse."""
    plan, groups = _plan(problem, q.device), _groups(q, k, problem)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)

    coming = _Gather(k, v, groups[0], plan, problem, comm)
    for at, group in enumerate(groups):
        keys, values = coming.wait()
        if at + 1 < len(groups):
            coming = _Gather(k, v, groups[at + 1], plan, problem, comm)
        with comm.computing(at, group.label):
            state = ringray_kernels.forward(
                q[:, group.heads],
                keys,
                values,
                plan.start,
                plan.end,
                scale=problem.scale,
                out_dtype=q.dtype,
                blocks=problem.blocks,
                backend=problem.backend,
            )
        out[:, group.heads], lse[:, group.heads] = state
        del keys, values, state
    return Result(out, lse, (q, k, v, out, lse))


def backward(
    dout: Tensor, saved: tuple[Tensor, ...], problem: RankProblem, comm: Comm
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's shard in fp32, over the queries and keys of all ranks."""
    q, k, v, out, lse = saved
    delta = ringray_kernels.delta(dout, out, lse, backend=problem.backend)
    plan, groups = _plan(problem, q.device), _groups(q, k, problem)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))

    def settle(going: tuple[_Scatter, _Group]) -> None:
        scatter, group = going
        scatter.wait(Chunk((dk[:, group.kv_heads], dv[:, group.kv_heads]), problem.own))

    coming = _Gather(k, v, groups[0], plan, problem, comm)
    going: tuple[_Scatter, _Group] | None = None
    for at, group in enumerate(groups):
        keys, values = coming.wait()
        if at + 1 < len(groups):
            coming = _Gather(k, v, groups[at + 1], plan, problem, comm)
        sums = ChunkShape((keys, values), torch.float32).zeros(Rows(0, plan.rows))
        dk_all, dv_all = sums.tensors
        with comm.computing(at, group.label):
            ringray_kernels.backward(
                dout[:, group.heads],
                q[:, group.heads],
                keys,
                values,
                lse[:, group.heads],
                delta[:, group.heads],
                plan.start,
                plan.end,
                scale=problem.scale,
                dq=dq[:, group.heads],
                dk=dk_all,
                dv=dv_all,
                out=out[:, group.heads],
                blocks=problem.blocks,
                backend=problem.backend,
            )
        del keys, values
        if going is not None:
            settle(going)
        going = (_Scatter(dk_all, dv_all, group, plan, problem, comm), group)
        del sums, dk_all, dv_all
    assert going is not None
    settle(going)
    return dq, dk, dv
