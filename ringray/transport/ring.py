"""The ring: K/V walk from neighbour to neighbour, only rows that are still needed, one hop ahead.

Forward, per hop: post the next hop, compute with the chunk at hand, merge, wait, swap. Backward is
the same walk afresh; the gradients of a chunk follow it one hop behind, summed in fp32 by each rank
that saw it, and its last visitor sends them home (Liu et al., Ring Attention, 2023; the route of
dK/dV is corrected, see docs/design.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

import ringray_kernels
from ringray.comm import Batch
from ringray_kernels import State

if TYPE_CHECKING:
    from ringray.comm import Comm
    from ringray.job import Job
    from ringray.walk import Hop, Rows


class Chunk(NamedTuple):
    """Rows of one owner's K and V (or dK and dV), each (B, Hkv, rows, D)."""

    k: Tensor
    v: Tensor
    rows: Rows

    def cut(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Views of some of the rows."""
        part = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        return self.k[:, :, part], self.v[:, :, part]


def _empty(like: Tensor, rows: Rows, dtype: torch.dtype | None = None) -> Chunk:
    batch, heads, _, width = like.shape
    shape = (batch, heads, rows.size, width)
    k, v = (torch.empty(shape, dtype=dtype or like.dtype, device=like.device) for _ in range(2))
    return Chunk(k, v, rows)


def _send(batch: Batch, chunk: Chunk, rows: Rows, to: int) -> None:
    if rows:
        for tensor in chunk.cut(rows):
            batch.send(tensor.contiguous(), to)


def _receive(
    batch: Batch, like: Tensor, rows: Rows, source: int, dtype: torch.dtype
) -> Chunk | None:
    if not rows:
        return None
    chunk = _empty(like, rows, dtype)
    batch.receive(chunk.k, source)
    batch.receive(chunk.v, source)
    return chunk


def forward(q: Tensor, k: Tensor, v: Tensor, job: Job, comm: Comm) -> State:
    """This rank's output in q's dtype and lse (fp32), over the keys of all ranks."""
    hops = job.hops("forward")
    direction = job.walk("forward").direction
    onward = (job.rank + direction) % job.world_size
    behind = (job.rank - direction) % job.world_size
    last = max((i for i, hop in enumerate(hops) if hop.need), default=0)

    held: Chunk | None = Chunk(k, v, hops[0].held)
    state: State | None = None
    for i, hop in enumerate(hops):
        batch = Batch()
        if held is not None:
            _send(batch, held, hop.forward, onward)
        arriving = None
        if i + 1 < len(hops):
            arriving = _receive(batch, k, hops[i + 1].held, behind, k.dtype)
        pending = comm.post(batch)
        if hop.need or i == 0:
            assert held is not None
            state = _attend(q, held, hop, job, state, q.dtype if i == last else None)
        pending.wait()
        held = arriving
    assert state is not None
    return state


def _attend(
    q: Tensor, held: Chunk, hop: Hop, job: Job, state: State | None, out_dtype: torch.dtype | None
) -> State:
    rows = hop.need or hop.held
    start, end = job.intervals(hop.owner, rows, q.device)
    k, v = held.cut(rows)
    return ringray_kernels.forward(
        q,
        k,
        v,
        start,
        end,
        scale=job.scale,
        state=state,
        out_dtype=out_dtype,
        blocks=job.blocks,
        backend=job.backend,
    )


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, job: Job, comm: Comm
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's shard in fp32, over the queries and keys of all ranks.

    ``out`` in q's dtype and ``lse`` are the global ones that ``forward`` returned.
    """
    walk = job.walk("backward")
    hops = walk.hops[job.rank]
    onward = (job.rank + walk.direction) % job.world_size
    behind = (job.rank - walk.direction) % job.world_size

    delta = ringray_kernels.delta(dout, out, lse, backend=job.backend)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    home = Chunk(
        torch.zeros(k.shape, dtype=torch.float32, device=k.device),
        torch.zeros(v.shape, dtype=torch.float32, device=v.device),
        hops[0].held,
    )

    held: Chunk | None = Chunk(k, v, hops[0].held)
    leaving: Chunk | None = None  # the sum that this rank finished at the hop before
    leaving_to = onward
    returning: Chunk | None = None
    for i in range(len(hops) + 1):
        hop = hops[i] if i < len(hops) else None
        batch = Batch()
        if hop is not None and held is not None:
            _send(batch, held, hop.forward, onward)
        arriving = None
        if i + 1 < len(hops):
            arriving = _receive(batch, k, hops[i + 1].held, behind, k.dtype)
        if leaving is not None:
            _send(batch, leaving, leaving.rows, leaving_to)
        summed = _receive(batch, k, hop.sum_in, behind, torch.float32) if hop is not None else None
        coming = walk.home[job.rank]
        if coming is not None and coming[2] == i - 1:
            returning = _receive(batch, k, coming[0], coming[1], torch.float32)
        pending = comm.post(batch)

        mine: Chunk | None = None
        if hop is not None and (i == 0 or hop.sum_out):
            mine = home if i == 0 else _zeros(k, hop.sum_out)
            if hop.need:
                assert held is not None
                _differentiate(dout, q, held, mine, hop, job, out, lse, delta, dq)
        pending.wait()
        if mine is not None and summed is not None:
            _add(mine, summed)
        leaving = mine if i > 0 else None
        leaving_to = hop.sum_to if hop is not None else onward
        held = arriving
    if returning is not None:
        _add(home, returning)
    return dq, home.k, home.v


def _zeros(like: Tensor, rows: Rows) -> Chunk:
    chunk = _empty(like, rows, torch.float32)
    return Chunk(chunk.k.zero_(), chunk.v.zero_(), rows)


def _add(total: Chunk, part: Chunk) -> None:
    for into, tensor in zip(total.cut(part.rows), (part.k, part.v), strict=True):
        into += tensor


def _differentiate(
    dout: Tensor,
    q: Tensor,
    held: Chunk,
    into: Chunk,
    hop: Hop,
    job: Job,
    out: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
) -> None:
    start, end = job.intervals(hop.owner, hop.need, q.device)
    k, v = held.cut(hop.need)
    dk, dv = into.cut(hop.need)
    ringray_kernels.backward(
        dout,
        q,
        k,
        v,
        lse,
        delta,
        start,
        end,
        scale=job.scale,
        dq=dq,
        dk=dk,
        dv=dv,
        out=out,
        blocks=job.blocks,
        backend=job.backend,
    )
