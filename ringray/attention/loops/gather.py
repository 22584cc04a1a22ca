"""A few heads at a time with the keys of all ranks.

While one group of K/V heads is computed, the next is gathered. Rows are put in the order of their
positions, so each query meets all its keys in one call and nothing is merged. In backward each
rank's share of dK/dV goes straight to its owner, which adds the shares in the order of ranks.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

import ringray_kernels
from ringray.attention.loops.chunks import Chunk, ChunkShape, Result
from ringray.comm.batch import Batch
from ringray.traffic.walk import Rows
from ringray_kernels.merge import merge_sinks_

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringray.attention.problem import Ranges, RankProblem
    from ringray.attention.tensor_arguments import ScoreParameters
    from ringray.comm.ring import Comm
    from ringray.traffic.script import Key


@dataclass(frozen=True)
class _Plan:
    """Rows that one rank gathers and gives, and their places in the order of positions.

    ``wanted``: rows of each owner and part, this rank's own among them as part 0. ``sent``: own
    rows by the rank that wants them and their part. ``place``: the places of wanted rows.
    ``ranges``: of the gathered rows that a query sees. ``order``: positions of the gathered rows,
    int32.
    """

    rank: int
    own: Rows
    wanted: dict[Key, Rows]
    sent: dict[Key, Rows]
    place: dict[Key, Tensor]
    ranges: Ranges
    order: Tensor

    @property
    def rows(self) -> int:
        return sum(rows.size for rows in self.wanted.values())


def _plan(problem: RankProblem, device: torch.device) -> _Plan:
    return problem.once("gather", device, lambda: _planned(problem, device))


def _planned(problem: RankProblem, device: torch.device) -> _Plan:
    script, rank, own = problem.script("forward"), problem.rank, problem.own
    moved = [m for step in script.steps for m in step.messages if m.send and m.chunk]
    sent = {(m.peer, m.part): m.rows for m in moved}
    wanted = {visit.key: visit.need or visit.held for visit in script.visits}
    positions_of = {key: problem.positions_at(key[0], rows, device) for key, rows in wanted.items()}
    # In the order of positions a mask is an interval of the gathered rows, as of a whole sequence.
    order = torch.cat(list(positions_of.values())).sort().values
    place = {key: torch.searchsorted(order, positions) for key, positions in positions_of.items()}
    seen = problem.intervals_of(rank, own, order)
    return _Plan(rank, own, wanted, sent, place, seen, order.int())


class _Group(NamedTuple):
    """Some K/V heads that are computed with at one step, and the query heads that share them."""

    step: int
    heads: slice
    kv_heads: slice
    label: str


def _groups(q: Tensor, k: Tensor, problem: RankProblem) -> list[_Group]:
    count, share, kv_heads = problem.exchange.heads_at_once, q.shape[1] // k.shape[1], k.shape[1]
    assert count is not None
    groups = []
    for step, first in enumerate(range(0, kv_heads, count)):
        stop = min(first + count, kv_heads)
        several = stop - first > 1
        label = f"K/V heads {first} to {stop - 1}" if several else f"K/V head {first}"
        heads = slice(first * share, stop * share)
        groups.append(_Group(step, heads, slice(first, stop), label))
    return groups


def _gather(
    tensors: tuple[Tensor, ...], group: _Group, plan: _Plan, comm: Comm
) -> Callable[[], tuple[Tensor, ...]]:
    """Starts to gather K and V (and their scales) of one group; the result waits for them and puts
    them in order."""
    own = Chunk(tuple(x[:, group.kv_heads] for x in tensors), plan.own)
    # They travel while the group before is computed with.
    hop = comm.hop(f"step {group.step - 1}" if group.step else "start")
    shape, batch = ChunkShape(own.tensors), Batch(hop, f"{group.label} of all")
    parts = {key: shape.empty(rows) for key, rows in plan.wanted.items() if key[0] != plan.rank}
    for (peer, _), rows in plan.sent.items():
        for x in own.cut(rows):
            batch.send(x.contiguous(), peer)
    for (owner, _), part in parts.items():
        for x in part.tensors:
            batch.receive(x, owner)
    pending = comm.post(batch)

    def wait() -> tuple[Tensor, ...]:
        pending.wait()
        mine = plan.wanted[plan.rank, 0]
        parts[plan.rank, 0] = Chunk(own.cut(mine), mine)
        gathered = shape.empty(Rows(0, plan.rows)).tensors
        for key, part in parts.items():
            for into, x in zip(gathered, part.tensors, strict=True):
                into.index_copy_(2, plan.place[key], x)
        parts.clear()
        return gathered

    return wait


def _scatter(
    sums: tuple[Tensor, ...], home: Chunk, group: _Group, plan: _Plan, comm: Comm
) -> Callable[[], None]:
    """Starts to send dK and dV of one group to their owners; the result waits for this rank's
    shares and adds them to ``home``."""
    hop = comm.hop(f"step {group.step + 1}")  # the step of the group after it
    shape, batch = ChunkShape(sums), Batch(hop, f"sums of {group.label}")
    for (owner, _), place in plan.place.items():
        if owner != plan.rank:
            for x in sums:
                batch.send(x.index_select(2, place), owner)
    shares = {key: shape.empty(rows) for key, rows in plan.sent.items()}
    for (peer, _), share in shares.items():
        for x in share.tensors:
            batch.receive(x, peer)
    own = plan.place[plan.rank, 0]
    mine = tuple(x.index_select(2, own) for x in sums)
    shares[plan.rank, 0] = Chunk(mine, plan.wanted[plan.rank, 0])
    pending = comm.post(batch)

    def wait() -> None:
        pending.wait()
        for key in sorted(shares):  # in one order, so that sums are the same bits in every run
            home.add(shares.pop(key))

    return wait


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: RankProblem,
    comm: Comm,
    parameters: ScoreParameters,
    scales: tuple[Tensor, ...] = (),
) -> Result:
    """Computes this rank's output over the keys of all ranks. Saved are q, k, v, out, lse.
    ``scales``: as in ``ring.forward``."""
    plan, groups = _plan(problem, q.device), _groups(q, k, problem)
    dtype, travelling = problem.quantized_from or q.dtype, (k, v, *scales[1:])
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    coming, bias = _gather(travelling, groups[0], plan, comm), parameters.bias()
    for number, group in enumerate(groups):
        keys, values, *of_keys = coming()
        # The next heads travel while these are computed with.
        if number + 1 < len(groups):
            coming = _gather(travelling, groups[number + 1], plan, comm)
        of_queries = [x[:, group.heads] for x in scales[:1]]
        with comm.computing(number, group.label):
            positional = problem.by_position_at(
                problem.rank, plan.own, plan.order, group.heads, bias
            )
            state = problem.attend(
                q[:, group.heads],
                keys,
                values,
                plan.ranges,
                out_dtype=dtype,
                scales=(*of_queries, *of_keys) or None,
                **positional,
            )
        out[:, group.heads], lse[:, group.heads] = state
        # Before the next ones are received: there is memory for two groups, not three.
        del keys, values, of_keys, state
    if parameters.sinks is not None:
        merge_sinks_(out, lse, parameters.sinks)
    return Result(out, lse, (q, k, v, out, lse))


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    problem: RankProblem,
    comm: Comm,
    parameters: ScoreParameters,
) -> tuple[Tensor, ...]:
    """Returns dq, dk, dv of this rank's shard in fp32, over the queries and keys of all ranks; and
    of the ``parameters`` the part of the gradient that comes from this rank's rows."""
    q, k, v, out, lse = saved
    delta = ringray_kernels.delta(dout, out, lse, dlse, backend=problem.call.strategy.backend)
    plan, groups = _plan(problem, q.device), _groups(q, k, problem)
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    bias = parameters.bias(with_gradient=True)
    coming = _gather((k, v), groups[0], plan, comm)
    going: Callable[[], None] | None = None
    for number, group in enumerate(groups):
        keys, values = coming()
        if number + 1 < len(groups):
            coming = _gather((k, v), groups[number + 1], plan, comm)
        sums = ChunkShape((keys, values), torch.float32).zeros(Rows(0, plan.rows)).tensors
        with comm.computing(number, group.label):
            positional = problem.by_position_at(
                problem.rank, plan.own, plan.order, group.heads, bias
            )
            problem.differentiate(
                tuple(x[:, group.heads] for x in (q, dout, lse, delta)),
                keys,
                values,
                plan.ranges,
                dq=dq[:, group.heads],
                dk=sums[0],
                dv=sums[1],
                out=out[:, group.heads] if dlse is None else None,
                **positional,
            )
        del keys, values
        # The shares of the heads before travelled beside this computation.
        if going is not None:
            going()
        home = Chunk((dk[:, group.kv_heads], dv[:, group.kv_heads]), plan.own)
        going = _scatter(sums, home, group, plan, comm)
        del sums
    assert going is not None
    going()
    return dq, dk, dv, *parameters.gradients(lse, delta, bias)
