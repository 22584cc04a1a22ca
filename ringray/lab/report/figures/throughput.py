"""Throughput against the sequence length, a line per strategy, beside the baseline's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ringray.lab.report import words
from ringray.lab.report.figures import data, lines, style
from ringray.lab.report.figures.data import Panel
from ringray.lab.trial.outcome import TrialRow


def draw(points: Sequence[TrialRow]) -> style.Chart | None:
    """Draws TFLOP/s of all ranks together, from the exact count of FLOPs, or GFLOP/s where all
    values are below one; bars are the p20 to p80 of the times. None where no length varies."""
    title = "Throughput by length"
    units = (1e-3, "GFLOP/s, all ranks"), (1.0, "TFLOP/s, all ranks")
    return lines.chart(points, "tflops", title, lambda most: units[most >= 1], baseline=baseline)


def baseline(panel: Panel, size: float = 1.0) -> style.Records:
    """Returns the throughput of the baseline by length, in units of ``size`` TFLOP/s: medians over
    the trials beside which it was measured; nothing without a baseline."""
    by_length: dict[int, list[float]] = {}
    for point in data.having(panel.points, "median_ms", "baseline_ms"):
        metrics = point.metrics
        reached = metrics["tflops"] / size * metrics["median_ms"] / metrics["baseline_ms"]
        by_length.setdefault(point.config["seq_len"], []).append(reached)
    name = words.baseline(panel.points[0].config) or "baseline"
    medians = ((length, statistics.median(by_length[length])) for length in sorted(by_length))
    return [lines.record(name, length, value, value, value) for length, value in medians]
