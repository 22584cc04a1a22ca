"""Reports of ranks, the metrics computed from them, and the memory meter.

The driver imports this module without torch.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ringray.instruments.hops import hidden, merged
from ringray.lab.trial.faults import Fault
from ringray.lab.trial.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from ringray.instruments.hops import Hop, Span
    from ringray.lab.trial.config import TrialConfig
    from ringray.lab.trial.outcome import Outcome, TrialRow

HOP = "hop: "  # prefix of a hop's samples: its milliseconds and bytes, as ``HOP_VALUES``
RANK = "rank: "  # prefix of the sums over a rank's hops, likewise
HOP_VALUES = ("compute_ms", "transfer_ms", "wait_ms", "sent_bytes")


@dataclass
class RankReport:
    """The report of one rank on one trial; plain data, so it crosses process borders.

    ``seconds`` of the pass on this rank and ``baseline_seconds``, on the ranks that compute the
    baseline, have one entry per repeat. ``values``: by the names of ``metrics.METRICS``, one entry
    per repeat or one in all. ``messages``: sends of one pass. ``errors``: shares of the error
    budget by tensor (rank 0 only). ``curves``: numbers of each step of a training, ``flops``: of
    one step on average, all ranks. ``hops``: see ``instruments.hops``. ``spans``: of the median
    repeat, from its barrier. ``notes``: sentences for the user. ``refused``: why this rank did not
    run the trial.
    """

    rank: int
    seconds: list[float] = field(default_factory=list)
    baseline_seconds: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    messages: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    flops: float | None = None
    hops: list[Hop] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str | None = None
    refused: str | None = None


def summarise(
    config: TrialConfig,
    flops: float,
    reports: Sequence[RankReport],
    before: Outcome | TrialRow | None = None,
    peak: float | None = None,
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Computes a trial's metrics, and the samples behind them, from the reports of all ranks.

    The time of a repeat is the slowest rank's; ``ratio`` is the median over repeats of ring over
    baseline. ``flops``: count of one pass, all ranks; ``peak``: FLOP/s of all of them, of a
    training. ``before``: an earlier visit to the same trial, whose repeats count too. ``repeats``
    is their number over all visits; it is left out where one visit measured the config's number.
    """
    # One number for each metric that every rank reports.
    metrics = {
        name: merge([statistics.median(report.values[name]) for report in reports])
        for name in reports[0].values
        if (merge := METRICS[name].ranks) and all(report.values.get(name) for report in reports)
    }
    samples = _times(reports)
    if before is not None and before.samples and samples:
        now, then = len(samples["ms"]), len(before.samples["ms"])
        samples = {name: [*before.samples[name], *later] for name, later in samples.items()}
        metrics |= _over_visits(metrics, now, before.metrics, then)
    if samples and (before is not None or len(samples["ms"]) != config.measure.repeats):
        metrics["repeats"] = len(samples["ms"])
    metrics |= _from_samples(config, flops, samples)
    if peak is not None and "tflops" in metrics:
        metrics["mfu"] = metrics["tflops"] * 1e12 / peak
    if (share := hidden(report.hops for report in reports)) is not None:
        metrics["hidden"] = share
    samples |= {HOP + h.name: _values([h]) for h in merged(report.hops for report in reports)}
    samples |= {f"{RANK}{report.rank}": _values(report.hops) for report in reports if report.hops}
    samples |= reports[0].curves
    metrics |= {f"error_{name}": share for name, share in reports[0].errors.items()}
    return metrics, samples


def _values(hops: Sequence[Hop]) -> list[float]:
    """Returns the sums of hops, as ``HOP_VALUES`` names them."""
    seconds = (sum(times) for times in zip(*(hop[2:5] for hop in hops), strict=True))
    return [*(duration * 1e3 for duration in seconds), float(sum(hop.sent for hop in hops))]


def _over_visits(
    new: Mapping[str, float], now: int, old: Mapping[str, float], then: int
) -> dict[str, float]:
    """Returns the metrics that depend on earlier visits; ``now``, ``then``: numbers of repeats."""
    combined = {}
    for name, value in new.items():
        if METRICS[name].visits == "max":
            combined[name] = max(value, old[name])
        elif METRICS[name].visits == "mean":
            combined[name] = (value * now + old[name] * then) / (now + then)
    return combined


def _times(reports: Sequence[RankReport]) -> dict[str, list[float]]:
    """Returns the samples of the repeats: milliseconds of the slowest rank and of the baseline."""
    slowest = [max(times) for times in zip(*(r.seconds for r in reports), strict=True)]
    samples = {"ms": [t * 1e3 for t in slowest]} if slowest else {}
    beside = [report.baseline_seconds for report in reports if report.baseline_seconds]
    if slowest and (baseline := [max(times) for times in zip(*beside, strict=True)]):
        samples["baseline_ms"] = [t * 1e3 for t in baseline]
        samples["ratio"] = [ring / base for ring, base in zip(slowest, baseline, strict=True)]
    return samples


def _from_samples(
    config: TrialConfig, flops: float, samples: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Returns the metrics that follow from the times of the repeats."""
    if "ms" not in samples:
        return {}
    import numpy as np

    p20_ms, p80_ms = map(float, np.quantile(samples["ms"], (0.2, 0.8)))
    seconds = statistics.median(samples["ms"]) / 1e3
    return {
        "p20_ms": p20_ms,
        "p80_ms": p80_ms,
        "tflops": flops / seconds / 1e12,
        "tflops_per_rank": flops / seconds / 1e12 / config.ring.size,
        "tokens_per_s": config.problem.batch
        * (config.problem.new_tokens or config.problem.seq_len)
        / seconds,
    } | {
        metric.name: statistics.median(samples[metric.median_of])
        for metric in METRICS.values()
        if metric.median_of in samples
    }


def verdict(reports: Sequence[RankReport]) -> Fault | None:
    """Returns the mismatch of a trial that every rank reported; None without one."""
    for report in reports:
        if report.failure:
            return Fault("mismatch", report.failure, (report.rank,))
    over = {name: share for name, share in reports[0].errors.items() if not share <= 1.0}
    if over:
        shares = ", ".join(f"{name} {share:.3g}" for name, share in over.items())
        return Fault("mismatch", f"error beyond the budget (1 is all of it): {shares}")
    return None


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Returns the peak bytes of PyTorch's allocator while ``work`` runs, beyond those live before.

    On a CPU the profiler adds up the allocator's events, so this run is slow: do not time it.
    """
    import torch

    if device.type == "cuda":
        x = torch.ones(16, 16, device=device, requires_grad=True)
        (x @ x).sum().backward()  # workspaces of cuBLAS, one a thread, are the process's
        torch.cuda.synchronize(device)
        live = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - live

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results = profiler.profiler.kineto_results
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    live = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        live += size
        peak = max(peak, live)
    return peak
