"""Heads for rows: neighbouring ranks exchange heads, so that each holds the rows of all of them for
its share of the heads, and something else computes attention on that.

Rows of the joined shards stand in the order of their positions, so all masks remain intervals. What
the backward pass needs is kept as it was computed with: only dO goes out again and dQ, dK, dV come
back, complete and so in their own dtype.

Shape legend: B batch, H heads, S rows of one shard, F ranks that exchange, D head dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringray.attention.loops.chunks import Result
from ringray.attention.problem import positions
from ringray.comm.ring import Batch
from ringray.traffic import geometry

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from ringray.attention.problem import RankProblem
    from ringray.comm.ring import Comm, Pending


@lru_cache(maxsize=64)
def _places(layout: geometry.Layout, rank: int, device: torch.device) -> tuple[Tensor, ...]:
    """Where the rows of each of the joined shards stand among all of a rank's rows."""
    joined = positions(layout, rank, device)
    apart = geometry.Layout(layout.partition, layout.padded, layout.ranks * layout.fold)
    shards = range(rank * layout.fold, (rank + 1) * layout.fold)
    return tuple(torch.searchsorted(joined, positions(apart, one, device)) for one in shards)


class _ToRows:
    """Tensors (B, H, S, D) on their way to (B, H / F, F * S, D)."""

    def __init__(self, tensors: Sequence[Tensor], comm: Comm) -> None:
        self._tensors, self._comm = tensors, comm
        batch = Batch(comm.hop("heads to rows"), f"{len(tensors)} tensors")
        self._parts: list[list[Tensor]] = []
        for x in tensors:
            mine, *_ = shares = x.chunk(comm.world_size, 1)
            parts = [
                shares[peer]
                if peer == comm.rank
                else torch.empty_like(mine, memory_format=torch.contiguous_format)
                for peer in range(comm.world_size)
            ]
            for peer in _others(comm):
                batch.send(shares[peer].contiguous(), peer)
                batch.receive(parts[peer], peer)
            self._parts.append(parts)
        self._pending: Pending = comm.post(batch)

    def wait(self, places: tuple[Tensor, ...]) -> list[Tensor]:
        """The joined tensors, rows in the order of positions."""
        self._pending.wait()
        joined = []
        while self._parts:
            parts = self._parts.pop(0)
            shape = list(parts[0].shape)
            shape[2] *= len(parts)
            whole = parts[0].new_empty(shape)
            for place, part in zip(places, parts, strict=True):
                whole.index_copy_(2, place, part)
            joined.append(whole)
        return joined


class _ToHeads:
    """Tensors (B, H / F, F * S, ...) on their way back to (B, H, S, ...)."""

    def __init__(self, tensors: Sequence[Tensor], comm: Comm, places: tuple[Tensor, ...]) -> None:
        batch = Batch(comm.hop("rows to heads"), f"{len(tensors)} tensors")
        self._parts: list[list[Tensor]] = []
        for x in tensors:
            shares = [x.index_select(2, place) for place in places]
            parts = [
                shares[peer] if peer == comm.rank else torch.empty_like(shares[peer])
                for peer in range(comm.world_size)
            ]
            for peer in _others(comm):
                batch.send(shares[peer], peer)
                batch.receive(parts[peer], peer)
            self._parts.append(parts)
        self._pending: Pending = comm.post(batch)

    def wait(self) -> list[Tensor]:
        """The tensors with all heads of this rank's rows."""
        self._pending.wait()
        whole = []
        while self._parts:
            whole.append(torch.cat(self._parts.pop(0), 1))
        return whole


def _others(comm: Comm) -> list[int]:
    """The other ranks, nearest above first: no rank is everybody's first."""
    return [(comm.rank + i) % comm.world_size for i in range(1, comm.world_size)]


def forward(
    q: Tensor, k: Tensor, v: Tensor, problem: RankProblem, comm: Comm, inner: ModuleType
) -> Result:
    """This rank's output, over the keys of all ranks. Saved is what ``inner`` saves."""
    near, far = comm.folded(problem.layout.fold)
    places = _places(problem.layout, problem.rank, q.device)
    q, k, v = _ToRows((q, k, v), near).wait(places)
    out, lse, saved = inner.forward(q, k, v, problem, far)
    out, lse = _ToHeads((out, lse), near, places).wait()
    return Result(out, lse, saved)


def backward(
    dout: Tensor, saved: tuple[Tensor, ...], problem: RankProblem, comm: Comm, inner: ModuleType
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's shard."""
    near, far = comm.folded(problem.layout.fold)
    places = _places(problem.layout, problem.rank, dout.device)
    (dout,) = _ToRows((dout,), near).wait(places)
    gradients = inner.backward(dout, saved, problem, far)
    dq, dk, dv = (x.to(dout.dtype) for x in gradients)
    del gradients
    dq, dk, dv = _ToHeads((dq, dk, dv), near, places).wait()
    return dq, dk, dv
