"""Throughput against the sequence length, a line per strategy, and the baseline's beside them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from ringray.lab.report import words
from ringray.lab.report.figures import data, lines, style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray.lab.report.figures.data import FigurePoint, Panel
    from ringray.lab.report.figures.lines import Line


def draw(points: Sequence[FigurePoint]) -> style.Figure | None:
    """TFLOP/s (GFLOP/s where it is below one) of all ranks together, from the exact count of FLOPs;
    None where no length varies."""
    panels, left_out = lines.panels(points, "tflops")
    if not panels:
        return None
    shown = [point for panel in panels for point in panel.points]
    small = max(point.metrics["tflops"] for point in shown) < 1
    size, unit = (1e-3, "GFLOP/s") if small else (1.0, "TFLOP/s")
    fields = data.strategies(shown)
    drawn = [
        lines.lines(panel, fields, lambda point: point.metrics["tflops"] / size, highest=True)
        for panel in panels
    ]
    look = lines.colours(panels, fields)
    with style.Style():
        figure, axes = style.grid(panels, "Throughput by length", left_out)
        for panel, one, found in zip(panels, axes, drawn, strict=True):
            for line in found:
                one.plot(line.xs, line.ys, label=line.name, **look[line.name])
            beside = baseline(panel, size)
            if beside:
                one.plot(
                    beside.xs, beside.ys, label=beside.name, color=style.BASELINE, linestyle="--",
                    linewidth=1.3, zorder=1,
                )  # fmt: skip
            style.lengths(one, [x for line in found for x in line.xs])
            one.set_ylim(bottom=0)
            one.set_ylabel(f"{unit}, all ranks")
        style.legend(figure, axes)
    return figure


def baseline(panel: Panel, size: float = 1.0) -> Line | None:
    """What the baseline reached at the same work, in units of ``size`` TFLOP/s, by length: medians
    over the trials that it was measured beside."""
    by_length: dict[int, list[float]] = {}
    for point in data.having(panel.points, "median_ms", "baseline_ms"):
        metrics = point.metrics
        reached = metrics["tflops"] / size * metrics["median_ms"] / metrics["baseline_ms"]
        by_length.setdefault(point.config["seq_len"], []).append(reached)
    if not by_length:
        return None
    xs = sorted(by_length)
    name = words.baseline(panel.points[0].config) or "baseline"
    return lines.Line(name, xs, [statistics.median(by_length[x]) for x in xs])
