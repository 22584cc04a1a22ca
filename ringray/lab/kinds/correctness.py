"""Correctness: the ring's output and gradients against an fp64 oracle, as shares of the budget.

Every rank deals the same inputs, with NaN as padding (which must not reach any result); rank 0
puts the shards together and compares. With more than one repeat the results must be equal bit by
bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringray.attention.sharding import local_positions, shard, unshard
from ringray.comm.batch import METER
from ringray.comm.ring import connect
from ringray.instruments.progress import HERE
from ringray.lab.kinds.base import RankContext, ring_pass, sinks, slopes, visible
from ringray.lab.trial.config import TrialConfig, TrialProblem
from ringray.lab.trial.measurement import RankReport
from ringray_kernels import testing
from ringray_kernels.dtypes import torch_dtype
from ringray_kernels.quantize import dequantized, quantized

NAMES = ("out", "dq", "dk", "dv")
_RESULTS = (*NAMES, "dsinks")


def run(config: TrialConfig, context: RankContext) -> RankReport:
    """Checks one trial; every rank of the ring calls it at the same time."""
    problem, partition = config.problem, config.partition
    with context.agreed():
        q, k, v, dout = (
            shard(x, dim=2, partition=partition, group=context.group, pad_value=torch.nan)
            for x in _inputs(problem, config.measure.seed, context.device)
        )
    for x in (q, k, v):
        x.requires_grad_(problem.has_backward)
    report = RankReport(rank=context.rank)
    first: tuple[Tensor, ...] | None = None
    for i in range(config.measure.warmup + config.measure.repeats):
        HERE.enter(f"run {i + 1}")
        meter = METER.snapshot()
        results = ring_pass(config, context, q, k, v, dout if problem.has_backward else None)
        used = METER.since(meter)
        report.values["sent_bytes"], report.messages = [used.sent_bytes], used.messages
        if first is None:
            first = results
        elif differing := [
            name
            for name, a, b in zip(_RESULTS, first, results, strict=False)
            if not torch.equal(a, b)
        ]:
            report.failure = f"two runs on the same inputs differ in {', '.join(differing)}"
    assert first is not None
    padding = local_positions(partition, problem.seq_len, config.ring.size, context.rank)
    padding = (padding >= problem.seq_len).to(context.device)
    for name, x in zip(NAMES, first, strict=False):
        if bool((x[:, :, padding] != 0).any()):
            report.failure = f"{name} is not zero on padded rows"
    HERE.enter("comparing")
    whole = [
        unshard(x, dim=2, partition=partition, group=context.group, seq_len=problem.seq_len)
        for x in first[: len(NAMES)]
    ]
    for share in first[len(NAMES) :]:  # of the gradient of sinks
        connect(context.group).sum(share, "sinks")
        whole.append(share)
    if context.rank == 0:
        shares = _shares(config, context.device, whole)
        if (taken := shares.pop("dsinks", 0.0)) > 1:
            report.failure = f"dsinks is beyond its error budget (1 is all of it): {taken:.3g}"
        report.errors = shares
    return report


def _shares(config: TrialConfig, device: torch.device, whole: list[Tensor]) -> dict[str, float]:
    want, yardstick, norm_of = _truth(config.problem, config.measure.seed, device)
    shares = {
        name: testing.budget_share(got, getattr(want, name), getattr(yardstick, name), norm_of)
        for name, got in zip(NAMES, whole, strict=False)
    }
    for got in whole[len(NAMES) :]:
        shares["dsinks"] = testing.sinks_share(got, want.dsinks, yardstick.dsinks)  # type: ignore[arg-type]
    return shares


@lru_cache(maxsize=8)
def _truth(
    problem: TrialProblem, seed: int, device: torch.device
) -> tuple[testing.Gradients, testing.Gradients, Tensor]:
    """Returns oracle, yardstick and dout; cached, because a sweep needs them for many rings."""
    q, k, v, dout = _inputs(problem, seed, device)
    seen = visible(problem, device)
    scale = problem.head_dim**-0.5
    upstream = dout if problem.has_backward else None
    learned = sinks(problem, seed, device) if problem.sinks else None
    scoring: dict[str, Any] = {"scale": scale, "softcap": problem.softcap, "sinks": learned}
    scoring["slopes"] = slopes(problem)
    scoring["factors"] = testing.dropout_factors(q, problem.dropout_p or 0.0, seed)
    fp8 = problem.quantize is not None
    if fp8:
        q, k, v = (dequantized(*quantized(x)) for x in (q, k, v))
    return (
        testing.oracle(q, k, v, upstream, seen, **scoring),
        testing.yardstick(q, k, v, upstream, seen, causal=problem.causal, fp8=fp8, **scoring),
        dout,
    )


def _inputs(
    problem: TrialProblem, seed: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return testing.make_inputs(
        problem.batch,
        problem.heads,
        problem.kv_heads,
        problem.seq_len,
        problem.head_dim,
        torch_dtype(problem.dtype),
        seed=seed,
        device=device,
        value_dim=problem.value_dim,
    )
