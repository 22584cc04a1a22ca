"""Parts that kinds share: the context of a rank and the passes that are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ringray.attention import ring_attention
from ringray.attention.problem import Ranges, keywords
from ringray.base.errors import PeerError
from ringray.comm.batch import WaitScope
from ringray.lab.trial import faults
from ringray.lab.trial.config import TrialConfig, TrialProblem
from ringray_kernels import testing
from ringray_kernels.dtypes import torch_dtype
from ringray_kernels.intervals import visible_ranges


@dataclass(frozen=True)
class RankContext:
    """The place of a trial on this rank. ``group`` is None in a ring of one; ``side``: the same
    ranks over the CPU, for messages that must work when devices are full."""

    rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    side: dist.ProcessGroup | None = None

    def barrier(self) -> None:
        """Waits until every rank has arrived and this device has finished its work."""
        self.synchronize()
        if self.group is not None:
            # One message each way on the CPU or device group; cheaper than dist.barrier on NCCL.
            with WaitScope("barrier"):
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
                self.synchronize()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Surrounds allocations before ranks exchange messages: if one runs out of memory, all
        leave with an error, and the ring stays usable. No message may be in flight."""
        short: list[Exception] = []
        try:
            yield
        except Exception as error:
            if not faults.out_of_memory(error):
                raise
            short.append(error)
        if self._any(bool(short)):
            if short:
                raise short.pop()
            raise PeerError("another rank ran out of memory", "out-of-memory")

    def _any(self, mine: bool) -> bool:
        if self.side is None:
            return mine
        flag = torch.tensor([int(mine)])
        with WaitScope("memory"):
            dist.all_reduce(flag, group=self.side)
        return bool(flag.item())

    def synchronize(self) -> None:
        """Waits until this device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed(self, work: Callable[[], object]) -> float:
        """Returns the seconds of ``work`` on this rank, until its device has finished."""
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began


def ring_pass(
    config: TrialConfig, context: RankContext, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns (out,) or (out, dq, dk, dv) of this rank's shard, through the public op; with sinks
    also this rank's share of their gradient."""
    problem, strategy, seed = config.problem, config.strategy, config.measure.seed
    mask, learned = keywords(problem.mask, context.device), []
    if problem.sinks:
        learned.append(sinks(problem, seed, context.device).detach().requires_grad_())

    def attend() -> Tensor:
        out = ring_attention(
            q,
            k,
            v,
            group=context.group,
            partition=config.partition,
            seq_len=problem.seq_len,
            transport=strategy.transport,
            backward=strategy.backward,
            backend=strategy.backend,
            blocks=config.cut,
            softcap=problem.softcap,
            quantize=problem.quantize,
            sinks=learned[0] if learned else None,
            alibi_slopes=slopes(problem),
            dropout_p=problem.dropout_p or 0.0,
            dropout_seed=seed,
            **mask,
        )
        assert isinstance(out, Tensor)
        return out

    if dout is None:
        with torch.no_grad():
            return (attend(),)
    out = attend()
    return (out.detach(), *torch.autograd.grad(out, (q, k, v, *learned), dout))


def drawn(config: TrialConfig, context: RankContext, shape: tuple[int, ...], salt: int) -> Tensor:
    """Returns standard normal values by the trial's seed, others for each ``salt``."""
    seed = config.measure.seed * 1009 + salt
    generator = torch.Generator(device=context.device).manual_seed(seed)
    x = torch.empty(shape, dtype=torch_dtype(config.problem.dtype), device=context.device)
    return x.normal_(generator=generator)


@lru_cache(maxsize=4)
def sinks(problem: TrialProblem, seed: int, device: torch.device) -> Tensor:
    """Returns the attention sinks of the trial, fp32 (heads,), the same on every rank."""
    return testing.make_sinks(problem.heads, seed=seed, device=device)


def slopes(problem: TrialProblem) -> Tensor | None:
    """Returns the slopes of ALiBi of the trial, if it has them."""
    return testing.make_slopes(problem.heads) if problem.alibi else None


def visible_keys(problem: TrialProblem, device: torch.device) -> Ranges:
    """Returns the half-open ranges of keys that each query sees; int64 (S,), non-decreasing."""
    positions = torch.arange(problem.seq_len, device=device)
    return visible_ranges(positions, problem.seq_len, **keywords(problem.mask, device))


def visible(problem: TrialProblem, device: torch.device) -> Tensor:
    """Returns the (S, S) bool mask of the keys that each query sees."""
    return testing.visible(problem.seq_len, device=device, **keywords(problem.mask, device))
