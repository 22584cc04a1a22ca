"""From what ranks report to the numbers that are recorded, and the memory meter.

Statistics import nothing heavy: the driver uses them without torch.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ringray.instruments.hops import hidden, merged
from ringray.lab.trial import machine_load
from ringray.lab.trial.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from ringray.instruments.hops import Hop, Span
    from ringray.lab.trial.config import TrialConfig
    from ringray.lab.trial.outcome import Outcome, TrialRow

HOP = "hop: "  # samples under this and a hop's name: its milliseconds and bytes, as ``HOP_VALUES``
HOP_VALUES = ("compute_ms", "transfer_ms", "wait_ms", "sent_bytes")


@dataclass
class RankReport:
    """What one rank found out about one trial; plain data, so it crosses process borders.

    Lists have one entry per repeat: ``seconds`` of the pass on this rank, ``wait_seconds`` that it
    waited for messages, ``baseline_seconds`` (rank 0 only), ``compute_seconds`` of attention alone
    and ``transfer_seconds`` of all messages alone. ``sent_bytes``, ``messages``: of one pass.
    ``usage``: as ``ringray.lab.trial.machine_load`` reads it.
    ``peak_memory_bytes``: of PyTorch's allocator, None where it was not measured. ``errors``:
    shares of the error budget by tensor (rank 0 only). ``hops``: as ``spans.hops``. ``spans``: of
    the median repeat, from its barrier. ``refused``: why this rank did not try.
    """

    rank: int
    seconds: list[float] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)
    baseline_seconds: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    messages: int = 0
    peak_memory_bytes: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    compute_seconds: list[float] = field(default_factory=list)
    transfer_seconds: list[float] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    failure: str | None = None
    refused: str | None = None
    usage: dict[str, float] = field(default_factory=dict)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the sorted values lie, linearly interpolated."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarise(
    config: TrialConfig,
    flops: int,
    reports: Sequence[RankReport],
    before: Outcome | TrialRow | None = None,
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Metrics and the samples behind them, from the reports of all ranks.

    The time of a repeat is the slowest rank's; ``ratio`` is the median over repeats of ring over
    baseline. ``flops``: exact count of one pass, all ranks. ``before``: an earlier visit to the
    same trial, whose repeats count too. ``repeats`` is how many there are in all, where that is not
    what the config says or took several visits.
    """
    metrics: dict[str, float] = {}
    samples: dict[str, list[float]] = {}
    if reports[0].seconds:
        slowest = [max(times) for times in zip(*(r.seconds for r in reports), strict=True)]
        samples["ms"] = [t * 1e3 for t in slowest]
        metrics["wait_ms"] = max(statistics.median(r.wait_seconds) for r in reports) * 1e3
        if baseline := reports[0].baseline_seconds:
            samples["baseline_ms"] = [t * 1e3 for t in baseline]
            samples["ratio"] = [ring / base for ring, base in zip(slowest, baseline, strict=True)]
    metrics["sent_bytes"] = sum(r.sent_bytes for r in reports)
    peaks = [r.peak_memory_bytes for r in reports if r.peak_memory_bytes is not None]
    if peaks:
        metrics["peak_memory_bytes"] = max(peaks)
    if before is not None and before.samples and samples:
        now, then = len(samples["ms"]), len(before.samples["ms"])
        samples = {name: [*before.samples[name], *more] for name, more in samples.items()}
        metrics["wait_ms"] = (metrics["wait_ms"] * now + before.metrics["wait_ms"] * then) / (
            now + then
        )
        if "peak_memory_bytes" in metrics:
            metrics["peak_memory_bytes"] = max(
                metrics["peak_memory_bytes"], before.metrics["peak_memory_bytes"]
            )
    if samples and (before is not None or len(samples["ms"]) != config.repeats):
        metrics["repeats"] = len(samples["ms"])
    metrics |= _from_samples(config, flops, samples)
    if reports[0].transfer_seconds:
        overlap, by_hop = _overlap(reports)
        metrics |= overlap
        samples |= by_hop
    metrics |= {f"error_{name}": share for name, share in reports[0].errors.items()}
    metrics |= machine_load.together([report.usage for report in reports])
    return metrics, samples


def _from_samples(
    config: TrialConfig, flops: int, samples: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """What follows from the times of the repeats."""
    if "ms" not in samples:
        return {}
    ms = samples["ms"]
    seconds = statistics.median(ms) / 1e3
    metrics = {
        "median_ms": seconds * 1e3,
        "p20_ms": quantile(ms, 0.2),
        "p80_ms": quantile(ms, 0.8),
        "tflops": flops / seconds / 1e12,
        "tflops_per_rank": flops / seconds / 1e12 / config.ring_size,
        "tokens_per_s": config.batch * config.seq_len / seconds,
    }
    for name in ("baseline_ms", "ratio"):
        if name in samples:
            metrics[name] = statistics.median(samples[name])
    return metrics


def _overlap(
    reports: Sequence[RankReport],
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The metrics that only ``overlap`` has, which defines them, and the samples of each hop."""
    metrics = {
        "compute_ms": max(statistics.median(r.compute_seconds) for r in reports) * 1e3,
        "transfer_ms": max(statistics.median(r.transfer_seconds) for r in reports) * 1e3,
    }
    share = hidden(r.hops for r in reports)
    if share is not None:
        metrics["hidden"] = share
    samples = {
        HOP + hop.name: [hop.compute * 1e3, hop.transfer * 1e3, hop.wait * 1e3, float(hop.sent)]
        for hop in merged(r.hops for r in reports)
    }
    return metrics, samples


def verdict(reports: Sequence[RankReport]) -> Fault | None:
    """Why the trial counts as failed although every rank reported; None if it does not."""
    for report in reports:
        if report.failure:
            return Fault("mismatch", report.failure, (report.rank,))
    over = {name: share for name, share in reports[0].errors.items() if not share <= 1.0}
    if over:
        shares = ", ".join(f"{name} {share:.3g}" for name, share in over.items())
        return Fault("mismatch", f"error beyond the budget (1 is all of it): {shares}")
    return None


def peak_memory(work: Callable[[], object], device: torch.device) -> int:
    """Bytes that PyTorch's allocator handed out at once while ``work`` ran, beyond what was live.

    On CPU the allocator's own events are added up by the profiler, so this run is slow: never time
    it.
    """
    import torch

    if device.type == "cuda":
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
