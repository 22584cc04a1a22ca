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

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ringray.attention.agreement import BACKWARD, AgreedCall, agree, exchanging
from ringray.attention.loops import gather, heads, ring
from ringray_kernels.modes import lasting
from ringray_kernels.quantize import quantized

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    import torch
    from torch import Tensor

    from ringray.attention.loops.chunks import Result
    from ringray.attention.problem import RankProblem
    from ringray.attention.tensor_arguments import ScoreParameters
    from ringray.comm.ring import Comm

__all__ = ["HERE", "backward", "exactly", "forward"]


@exchanging()
def forward(
    q: Tensor, k: Tensor, v: Tensor, problem: RankProblem, comm: Comm, parameters: ScoreParameters
) -> Result:
    """Returns this rank's output, lse, and the tensors that its backward pass needs, besides
    the ``parameters``."""
    comm.meter.running = "forward"
    comm = comm.staged() if problem.exchange.staged else comm
    with exactly(q.device):
        scales: tuple[Tensor, ...] = ()
        if problem.quantized_from is not None:
            (q, k, v), scales = zip(*map(quantized, (q, k, v)), strict=True)
        if problem.exchange.fold > 1:
            return heads.forward(q, k, v, problem, comm, _inner(problem), parameters, scales)
        return _inner(problem).forward(q, k, v, problem, comm, parameters, scales)


@exchanging()
def backward(
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
    problem: RankProblem,
    comm: Comm,
    number: int,
    parameters: ScoreParameters,
) -> tuple[Tensor | None, ...]:
    """Returns dq, dk, dv of this rank's shard, and this rank's share of the gradient of each of the
    ``parameters``: the sum over all ranks is the gradient. Each has its tensor's dtype.

    ``dout`` is of q's dtype; ``saved`` is from ``forward``. ``dlse``: fp32 (B, Hq, S), or None
    where no loss depends on lse. ``number``: of the forward pass, on which all ranks agree before
    the first hop.
    """
    agree(comm, AgreedCall(BACKWARD, call=number))
    comm.meter.running = "backward"
    comm = comm.staged() if problem.exchange.staged else comm
    with exactly(dout.device):
        if problem.exchange.fold > 1:
            inner = _inner(problem)
            gradients = heads.backward(dout, dlse, saved, problem, comm, inner, parameters)
        else:
            gradients = _inner(problem).backward(dout, dlse, saved, problem, comm, parameters)
    dq, dk, dv = (x.to(dout.dtype) for x in gradients[:3])
    of_parameters = iter(gradients[3:])
    shares = [None if x is None else next(of_parameters).to(x.dtype) for x in parameters]
    return dq, dk, dv, *shares


class _LoopState(threading.local):
    """This thread. ``attending``: it computes one rank's part of a ring."""

    attending = False


HERE = _LoopState()


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Marks this thread, and computes without the modes of the caller."""
    before, HERE.attending = HERE.attending, True
    try:
        with lasting(device):
            yield
    finally:
        HERE.attending = before


def _inner(problem: RankProblem) -> ModuleType:
    return ring if problem.exchange.heads_at_once is None else gather
