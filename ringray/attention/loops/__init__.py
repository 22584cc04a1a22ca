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
    from ringray.attention.per_head import Learned
    from ringray.attention.problem import RankProblem
    from ringray.comm.ring import Comm

__all__ = ["HERE", "backward", "exactly", "forward"]


@exchanging()
def forward(
    q: Tensor, k: Tensor, v: Tensor, problem: RankProblem, comm: Comm, learned: Learned
) -> Result:
    """Returns this rank's output, lse, and the tensors that its backward pass needs, besides
    what is ``learned``."""
    comm.meter.running = "forward"
    comm = comm.staged() if problem.exchange.staged else comm
    with exactly(q.device):
        scales: tuple[Tensor, ...] = ()
        if problem.quantized_from is not None:
            (q, k, v), scales = zip(*map(quantized, (q, k, v)), strict=True)
        if problem.exchange.fold > 1:
            return heads.forward(q, k, v, problem, comm, _inner(problem), learned, scales)
        return _inner(problem).forward(q, k, v, problem, comm, learned, scales)


@exchanging()
def backward(
    dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...], problem: RankProblem, comm: Comm,
    call: int, learned: Learned,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns dq, dk, dv of this rank's shard; ``saved`` is from ``forward``. With ``sinks`` also
    this rank's share of their gradient, fp32 (Hq,): the sum over all ranks is the gradient.

    ``dlse``: fp32 (B, Hq, S), or None where no loss depends on lse. ``call``: number of the forward
    pass, on which all ranks agree before the first hop.
    """
    agree(comm, AgreedCall(BACKWARD, call=call))
    comm.meter.running = "backward"
    comm = comm.staged() if problem.exchange.staged else comm
    with exactly(dout.device):
        if problem.exchange.fold > 1:
            return heads.backward(dout, dlse, saved, problem, comm, _inner(problem), learned)
        return _inner(problem).backward(dout, dlse, saved, problem, comm, learned)


class _Here(threading.local):
    """This thread. ``attending``: it computes one rank's part of a ring."""

    attending = False


HERE = _Here()


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
