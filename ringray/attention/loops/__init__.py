"""Forward and backward of one rank: what is computed when, and what is sent meanwhile.

``walked`` is the ring loop, for every route on which chunks walk. ``gathered`` computes a few heads
at a time with the keys of all ranks. ``folded`` exchanges heads for rows around either. Which one
runs is what the transport's ``Exchange`` says; the modules below know no transport by name.
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
    """This rank's output, lse, and what its backward pass needs."""
    comm.meter.running = "forward"
    comm = comm.staged() if problem.exchange.staged else comm
    with _exactly(q.device):
        if problem.exchange.fold > 1:
            return heads.forward(q, k, v, problem, comm, _inner(problem))
        return _inner(problem).forward(q, k, v, problem, comm)


def backward(
    dout: Tensor, saved: tuple[Tensor, ...], problem: RankProblem, comm: Comm
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's shard; ``saved`` is what ``forward`` returned."""
    comm.meter.running = "backward"
    comm = comm.staged() if problem.exchange.staged else comm
    with _exactly(dout.device):
        if problem.exchange.fold > 1:
            return heads.backward(dout, saved, problem, comm, _inner(problem))
        return _inner(problem).backward(dout, saved, problem, comm)


def _exactly(device: torch.device) -> AbstractContextManager[None]:
    """Autocast is for what calls the op: within, it would take fp32 sums through half precision."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _inner(problem: RankProblem) -> ModuleType:
    return ring if problem.exchange.heads_at_once is None else gather
