"""The ring loop: chunks walk from rank to rank while each rank computes with those that it holds.

Per step: begin the transfers that the walk's script lists, compute with the chunks at hand, merge,
end the transfers that are due. The script says what is sent; this loop does not know the route.
Sums of gradients follow one step behind the chunk that they belong to, in fp32, and come home.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

import ringray_kernels
from ringray.attention.loops.chunks import Chunk, ChunkShape, InFlight, Result
from ringray_kernels import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringray.attention.problem import RankProblem
    from ringray.comm.ring import Comm
    from ringray.traffic.script import Script, Visit
    from ringray.traffic.walk import Rows


def forward(q: Tensor, k: Tensor, v: Tensor, problem: RankProblem, comm: Comm) -> Result:
    """This rank's output over the keys of all ranks. Saved: q, k, v, out, lse and, where the
    backward pass walks back from here, the chunks that were received last."""
    script = problem.script("forward")
    walk = InFlight(comm, problem.rank, Chunk((k, v), problem.own), ChunkShape((k, v)))
    state: State | None = None
    left = sum(bool(visit.need) for visit in script.visits)
    kept = _keeps(problem)
    for at, step in enumerate(script.steps):
        walk.begin(at, step.messages)
        for visit in step.visits:
            left -= bool(visit.need)
            if visit.need or state is None:  # the first visit sets the state, whatever it needs
                out_dtype = None if left else q.dtype
                with comm.computing(at, f"chunk {visit.owner}"):
                    # No name for the chunk here: it would live until the next step's.
                    state = _attend(q, walk.held[visit.owner], visit, problem, state, out_dtype)
        walk.end(at, [visit.owner for visit in step.visits if visit.owner not in kept])
    walk.finish()
    assert state is not None
    extra = [x for owner, rows in kept.items() for x in walk.held[owner].cut(rows)]
    return Result(*state, (q, k, v, *state, *extra))


def _keeps(problem: RankProblem) -> dict[int, Rows]:
    """What this rank keeps, by owner, for a backward pass that begins with it."""
    return dict(problem.script("backward").kept) if problem.backward == "reverse" else {}


def _attend(
    q: Tensor,
    held: Chunk,
    visit: Visit,
    problem: RankProblem,
    state: State | None,
    out_dtype: torch.dtype | None,
) -> State:
    rows = visit.need or visit.held
    start, end = problem.intervals(problem.rank, problem.own, visit.owner, rows, q.device)
    k, v = held.cut(rows)
    return ringray_kernels.forward(
        q,
        k,
        v,
        start,
        end,
        scale=problem.scale,
        state=state,
        out_dtype=out_dtype,
        blocks=problem.blocks,
        backend=problem.backend,
    )


def backward(
    dout: Tensor, saved: tuple[Tensor, ...], problem: RankProblem, comm: Comm
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's shard in fp32, over the queries and keys of all ranks."""
    q, k, v, out, lse, *kept = saved
    delta = ringray_kernels.delta(dout, out, lse, backend=problem.backend)
    script = problem.script("backward")
    if problem.walks.travelling == "queries":
        return _queries_walk(dout, q, k, v, out, lse, delta, script, problem, comm)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    walk = InFlight(
        comm,
        problem.rank,
        Chunk((k, v), problem.own),
        ChunkShape((k, v)),
        ChunkShape((k, v), torch.float32),
    )
    for (owner, rows), *pair in zip(script.kept, kept[::2], kept[1::2], strict=True):
        walk.held[owner] = Chunk(tuple(pair), rows)

    def differentiate(visit: Visit, into: Chunk, share: Heads) -> None:
        heads, kv_heads = share
        start, end = problem.intervals(problem.rank, problem.own, visit.owner, visit.need, q.device)
        keys, values = walk.held[visit.owner].cut(visit.need)
        dk, dv = into.cut(visit.need)
        ringray_kernels.backward(
            dout[:, heads],
            q[:, heads],
            keys[:, kv_heads],
            values[:, kv_heads],
            lse[:, heads],
            delta[:, heads],
            start,
            end,
            scale=problem.scale,
            dq=dq[:, heads],
            dk=dk[:, kv_heads],
            dv=dv[:, kv_heads],
            out=out[:, heads],
            blocks=problem.blocks,
            backend=problem.backend,
        )

    _all_visits(walk, script, problem.rank, shares(q, k), comm, differentiate)
    assert walk.home is not None
    dk, dv = walk.home.tensors
    return dq, dk, dv


def _queries_walk(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    script: Script,
    problem: RankProblem,
    comm: Comm,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``backward``, where queries meet the keys that stay."""
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    queries = (q, dout, lse, delta)
    walk = InFlight(
        comm,
        problem.rank,
        Chunk(queries, problem.own),
        ChunkShape(queries),
        ChunkShape((q,), torch.float32),
    )

    def differentiate(visit: Visit, into: Chunk, share: Heads) -> None:
        heads, kv_heads = share
        start, end = problem.intervals(visit.owner, visit.need, problem.rank, problem.own, q.device)
        theirs = [x[:, heads] for x in walk.held[visit.owner].cut(visit.need)]
        (dq,) = into.cut(visit.need)
        own = visit.owner == problem.rank
        ringray_kernels.backward(
            theirs[1],
            theirs[0],
            k[:, kv_heads],
            v[:, kv_heads],
            theirs[2],
            theirs[3],
            start,
            end,
            scale=problem.scale,
            dq=dq[:, heads],
            dk=dk[:, kv_heads],
            dv=dv[:, kv_heads],
            out=out[:, heads, visit.need.start : visit.need.stop] if own else None,
            blocks=problem.blocks,
            backend=problem.backend,
        )

    _all_visits(walk, script, problem.rank, shares(q, k), comm, differentiate)
    assert walk.home is not None
    return walk.home.tensors[0], dk, dv


class Heads(NamedTuple):
    """Some query heads, and the K/V heads that they share."""

    heads: slice
    kv_heads: slice


def shares(q: Tensor, k: Tensor) -> tuple[Heads, ...]:
    """The heads in two halves, or all at once where there is one K/V head."""
    heads, kv_heads = q.shape[1], k.shape[1]
    half = kv_heads // 2
    if half == 0:
        return (Heads(slice(0, heads), slice(0, kv_heads)),)
    middle = half * (heads // kv_heads)
    return (
        Heads(slice(0, middle), slice(0, half)),
        Heads(slice(middle, heads), slice(half, kv_heads)),
    )


def _all_visits(
    walk: InFlight,
    script: Script,
    rank: int,
    halves: tuple[Heads, ...],
    comm: Comm,
    differentiate: Callable[[Visit, Chunk, Heads], None],
) -> None:
    """Execute a backward script. Half of the own chunk's work is kept for the last step, so that
    the sums which come home then have something to hide behind."""
    last = len(script.steps) - 1
    assert walk.home is not None
    whole = Heads(slice(None), slice(None))
    waiting: tuple[Visit, Heads] | None = None
    for at, step in enumerate(script.steps):
        walk.begin(at, step.messages)
        for visit in step.visits:
            share, own = whole, visit.owner == rank
            if own and at < last and len(halves) == 2:
                share, waiting = halves[0], (visit, halves[1])
            if not own and visit.sums:
                walk.sums[visit.owner] = walk.zeros(visit.sums)
            if visit.need:
                with comm.computing(at, f"chunk {visit.owner}"):
                    differentiate(visit, walk.home if own else walk.sums[visit.owner], share)
        if at == last and waiting is not None and waiting[0].need:
            with comm.computing(at, f"chunk {rank}"):
                differentiate(waiting[0], walk.home, waiting[1])
        walk.end(at, [visit.owner for visit in step.visits])
    walk.finish()
