"""Loops: forward and backward of one rank, computation beside messages.

``ring`` serves every route on which chunks walk. ``gather`` computes a few heads at a time with the
keys of all ranks. ``heads`` exchanges heads for rows around either. The transport's ``Exchange``
selects the loop; no module here knows a transport by name.

ring    the ring loop, and the chunks and messages in flight
chunks  rows of one owner's tensors
gather  a few heads with the keys of all ranks
heads   exchange of heads for rows around another loop
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from ringray.attention.loops import gather, heads, ring

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from ringray.attention.loops.chunks import Result
    from ringray.attention.problem import RankProblem
    from ringray.comm.ring import Comm

__all__ = ["backward", "forward"]


def forward(q: Tensor, k: Tensor, v: Tensor, problem: RankProblem, comm: Comm) -> Result:
    """Returns this rank's output, lse, and the tensors that its backward pass needs."""
    comm.meter.running = "forward"
    comm = comm.staged() if problem.exchange.staged else comm
    with _exactly(q.device):
        if problem.exchange.fold > 1:
            return heads.forward(q, k, v, problem, comm, _inner(problem))
        return _inner(problem).forward(q, k, v, problem, comm)


def backward(
    dout: Tensor, saved: tuple[Tensor, ...], problem: RankProblem, comm: Comm
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv of this rank's shard; ``saved`` is from ``forward``."""
    comm.meter.running = "backward"
    comm = comm.staged() if problem.exchange.staged else comm
    with _exactly(dout.device):
        if problem.exchange.fold > 1:
            return heads.backward(dout, saved, problem, comm, _inner(problem))
        return _inner(problem).backward(dout, saved, problem, comm)


def _exactly(device: torch.device) -> AbstractContextManager[None]:
    """Turns autocast off, which would compute fp32 sums in half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _inner(problem: RankProblem) -> ModuleType:
    return ring if problem.exchange.heads_at_once is None else gather
