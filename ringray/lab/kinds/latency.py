"""Latency: the time of one pass on the whole ring, interleaved with a baseline.

Each repeat times the ring from a barrier to the slowest rank's end, then the baseline, on rank 0
while the other ranks wait or on all of them, in alternating order; ratios are taken pair by pair,
so that a drift of the machine's speed cancels. Memory is measured in the first warm-up run, which
is not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from ringray.comm.batch import METER
from ringray.instruments.progress import HERE
from ringray.lab.kinds.base import RankContext, drawn, ring_pass
from ringray.lab.kinds.baselines import BASELINES
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.measurement import RankReport, peak_memory
from ringray.partition import DEFAULT, padded_length

Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


def _inputs(
    config: TrialConfig, rows: int, context: RankContext, salt: int, *, rows_first: bool = False
) -> Inputs:
    """Returns q, k, v and dout (None for forward alone) of standard normal values, (B, H, S, D) or
    (B, S, H, D)."""
    problem = config.problem

    def made(number: int, heads: int, width: int) -> Tensor:
        sides = (rows, heads) if rows_first else (heads, rows)
        return drawn(config, context, (problem.batch, *sides, width), salt + number)

    q = made(0, problem.heads, problem.head_dim)
    k = made(1, problem.kv_heads, problem.head_dim)
    v = made(2, problem.kv_heads, problem.value_dim)
    if not problem.has_backward:
        return q, k, v, None
    for x in (q, k, v):
        x.requires_grad_()
    return q, k, v, made(3, problem.heads, problem.value_dim)


def shards(config: TrialConfig, context: RankContext) -> Inputs:
    """Returns q, k, v and dout of this rank."""
    rows = config.padded // config.ring.size
    with context.agreed():
        return _inputs(config, rows, context, salt=4 * (context.rank + 1))


def run(config: TrialConfig, context: RankContext) -> RankReport:
    """Measures one trial on this rank; every rank of the ring calls it at the same time."""
    inputs = shards(config, context)
    return measure(config, context, inputs, partial(ring_pass, config, context, *inputs))


def measure(
    config: TrialConfig,
    context: RankContext,
    inputs: Sequence[Tensor | None],
    ring: Callable[[], object],
    beside: Callable[[], None] | None = None,
    alone: Callable[[TrialConfig, RankContext], Callable[[], float] | None] | None = None,
) -> RankReport:
    """Times ``ring``, which works on ``inputs``, and the baseline. ``beside`` runs at the end of
    each repeat, on all ranks at once; its traffic is not counted. ``alone``: makes another baseline
    than the whole pass."""
    measure = config.measure
    baseline = (alone or _baseline)(config, context) if measure.baseline else None
    report = RankReport(rank=context.rank)
    held = sum(x.numel() * x.element_size() for x in inputs if x is not None)
    for i in range(measure.warmup):
        HERE.enter(f"warm-up {i + 1}")
        context.barrier()
        if i == 0:
            report.values["peak_memory_bytes"] = [held + peak_memory(ring, context.device)]
        else:
            ring()
        if measure.baseline:
            with context.agreed():
                if baseline is not None:
                    baseline()
    for i in range(measure.repeats):
        HERE.enter(f"repeat {i + 1}")
        context.barrier()
        # Ring and baseline take turns at being first, so that neither finds the warmer machine.
        if baseline is not None and i % 2:
            report.baseline_seconds.append(baseline())
        context.barrier()
        meter = METER.snapshot()
        report.seconds.append(context.timed(ring))
        used = METER.since(meter)
        report.values.setdefault("wait_ms", []).append(used.wait_s * 1e3)
        report.values["sent_bytes"], report.messages = [used.sent_bytes], used.messages
        context.barrier()
        if baseline is not None and not i % 2:
            report.baseline_seconds.append(baseline())
        if beside is not None:
            context.barrier()
            beside()
    context.barrier()
    return report


def _baseline(config: TrialConfig, context: RankContext) -> Callable[[], float] | None:
    """Returns a function that times the baseline: its part on this rank, or None if it has none
    here. All ranks call this."""
    assert config.measure.baseline is not None
    kind = BASELINES[config.measure.baseline]
    module = importlib.import_module(kind.module)
    rows = config.problem.seq_len
    if kind.on_ring:
        rows = padded_length(DEFAULT, rows, config.ring.size) // config.ring.size
    with context.agreed():
        if context.rank and not kind.on_ring:
            return None
        salt = 4 * (context.rank + 1) if kind.on_ring else 0
        q, k, v, dout = _inputs(config, rows, context, salt, rows_first=kind.rows_first)
        attend = module.prepare(config, context, q, k, v)
    around = getattr(module, "around", lambda *_: nullcontext())

    def work() -> None:
        if dout is None:
            with torch.no_grad():
                attend()
        else:
            torch.autograd.grad(attend(), (q, k, v), dout)

    return timed_alone(config, context, work, partial(around, config, context, rows))


def timed_alone(
    config: TrialConfig,
    context: RankContext,
    work: Callable[[], object],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Callable[[], float]:
    """Returns a function that times ``work`` in ``around``, with the threads of the baseline."""

    def timed() -> float:
        torch.set_num_threads(config.measure.baseline_threads or config.ring.threads)
        try:
            with around():
                return context.timed(work)
        finally:
            torch.set_num_threads(config.ring.threads)

    return timed
