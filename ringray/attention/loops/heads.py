"""Heads for rows: neighbouring ranks exchange heads, so that each holds the rows of all of them for
its share of the heads; another loop computes attention on the joined rows.

Rows of the joined shards stand in the order of their positions, so all masks remain intervals. The
operands of the backward pass are kept in this form: only dO goes out again, and dQ, dK, dV come
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
from ringray.comm.batch import Batch
from ringray.traffic import geometry

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from ringray.attention.problem import RankProblem
    from ringray.attention.tensor_arguments import ScoreParameters
    from ringray.comm.ring import Comm


@lru_cache(maxsize=64)
def _places(layout: geometry.Layout, rank: int, device: torch.device) -> tuple[Tensor, ...]:
    """Returns, for each of the joined shards, the places of its rows among all rows of a rank."""
    joined = positions(layout, rank, device)
    apart = geometry.Layout(layout.partition, layout.padded, layout.ranks * layout.fold)
    shards = range(rank * layout.fold, (rank + 1) * layout.fold)
    return tuple(torch.searchsorted(joined, positions(apart, shard, device)) for shard in shards)


def _to_rows(tensors: Sequence[Tensor], comm: Comm, places: tuple[Tensor, ...]) -> list[Tensor]:
    """Exchanges (B, H, S, D) for (B, H / F, F * S, D), rows in the order of positions."""
    swapped = _swap("heads to rows", [x.chunk(comm.world_size, 1) for x in tensors], comm)
    joined = []
    while swapped:  # popped, so that the parts of one tensor are freed before the next is joined
        parts = swapped.pop(0)
        batch, heads, rows, *rest = parts[0].shape
        whole = parts[0].new_empty((batch, heads, rows * len(parts), *rest))
        for place, part in zip(places, parts, strict=True):
            whole.index_copy_(2, place, part)
        joined.append(whole)
    return joined


def _to_heads(tensors: Sequence[Tensor], comm: Comm, places: tuple[Tensor, ...]) -> list[Tensor]:
    """Exchanges (B, H / F, F * S, ...) for (B, H, S, ...), all heads of this rank's rows."""
    shares = [[x.index_select(2, place) for place in places] for x in tensors]
    swapped = _swap("rows to heads", shares, comm)
    del shares
    whole = []
    while swapped:
        whole.append(torch.cat(swapped.pop(0), 1))
    return whole


def _swap(direction: str, tensors: Sequence[Sequence[Tensor]], comm: Comm) -> list[list[Tensor]]:
    """Sends each rank its share of each tensor; returns the shares from all ranks."""
    batch = Batch(comm.hop(direction), f"{len(tensors)} tensors")
    # The nearest rank above goes first, so that no rank is the first peer of all others.
    others = [(comm.rank + i) % comm.world_size for i in range(1, comm.world_size)]
    received = []
    for shares in tensors:
        parts = [
            x if peer == comm.rank else torch.empty_like(x, memory_format=torch.contiguous_format)
            for peer, x in enumerate(shares)
        ]
        for peer in others:
            batch.send(shares[peer].contiguous(), peer)
            batch.receive(parts[peer], peer)
        received.append(parts)
    comm.post(batch).wait()
    return received


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: RankProblem,
    comm: Comm,
    inner: ModuleType,
    parameters: ScoreParameters,
    scales: tuple[Tensor, ...] = (),
) -> Result:
    """Computes this rank's output over the keys of all ranks; saves what ``inner`` saves.
    ``scales``: as in ``ring.forward``."""
    near, far = comm.folded(problem.layout.fold)
    places = _places(problem.layout, problem.rank, q.device)
    q, k, v, *shares = _to_rows((q, k, v, *scales), near, places)
    out, lse, saved = inner.forward(q, k, v, problem, far, _share(parameters, near), tuple(shares))
    out, lse = _to_heads((out, lse), near, places)
    return Result(out, lse, saved)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    problem: RankProblem,
    comm: Comm,
    inner: ModuleType,
    parameters: ScoreParameters,
) -> tuple[Tensor, ...]:
    """Returns dq, dk, dv of this rank's shard; and of the ``parameters`` the gradient from its
    share of the heads, 0 for the others."""
    near, far = comm.folded(problem.layout.fold)
    places = _places(problem.layout, problem.rank, dout.device)
    if problem.call.return_lse and dlse is None:  # other ranks may have one
        dlse = torch.zeros(dout.shape[:3], dtype=torch.float32, device=dout.device)
    dout, *of_lse = _to_rows((dout,) if dlse is None else (dout, dlse), near, places)
    gradients = inner.backward(
        dout, of_lse[0] if of_lse else None, saved, problem, far, _share(parameters, near)
    )
    dq, dk, dv = (x.to(dout.dtype) for x in gradients[:3])
    # A rank knows the gradient of its share of the heads; the sum over ranks is the whole.
    shares = [x.new_zeros(x.shape, dtype=torch.float32) for x in parameters if x is not None]
    for whole, part in zip(shares, gradients[3:], strict=True):
        whole.chunk(near.world_size)[near.rank].copy_(part)
    del gradients
    dq, dk, dv = _to_heads((dq, dk, dv), near, places)
    return dq, dk, dv, *shares


def _share(parameters: ScoreParameters, near: Comm) -> ScoreParameters:
    """Returns the parameters of this rank's share of the heads."""
    return parameters.share(near.world_size, near.rank)
