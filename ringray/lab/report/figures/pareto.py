"""Time against peak memory: the strategies that no other beats in both, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

from ringray.base.units import MIB
from ringray.lab.report.figures import data, style
from ringray.lab.search.base import layers
from ringray.lab.trial.outcome import TrialRow

MAX_NAMES = 6  # per panel: the front's ends and points evenly between them


def draw(points: Sequence[TrialRow]) -> style.Figure | None:
    """Draws the points and the front of each problem; None where memory does not vary."""
    every, left_out = data.panels(data.having(points, "median_ms", "peak_memory_bytes"))
    panels = [one for one in every if len({p.metrics["peak_memory_bytes"] for p in one.points}) > 1]
    fields = data.strategies([point for panel in panels for point in panel.points])
    if not panels or not fields:
        return None
    title = "Time against peak memory, lower left is better"
    figure, axes = style.grid([one.title for one in panels], title, left_out)
    for panel, one in zip(panels, axes, strict=True):
        best = next(layers(panel.points, _scores))
        others = [point for point in panel.points if point not in best]
        if others:
            one.scatter(*_places(others), color="#bbbbbb", s=22, label="beaten by another")
        one.plot(
            *_places(best), color=style.COLOURS[0], marker="o", drawstyle="steps-post",
            label="Pareto front",
        )  # fmt: skip
        _names(one, best, fields)
        one.margins(x=0.25, y=0.18)
        one.set_xlabel("median time (ms)")
        one.set_ylabel("peak memory per rank (MiB)")
    style.legend(figure, axes)
    return figure


def _scores(point: TrialRow) -> tuple[float, float]:
    return point.metrics["median_ms"], point.metrics["peak_memory_bytes"]


def _places(points: Sequence[TrialRow]) -> tuple[list[float], list[float]]:
    xs = [point.metrics["median_ms"] for point in points]
    return xs, [point.metrics["peak_memory_bytes"] / MIB for point in points]


def _names(axes: style.Axes, best: Sequence[TrialRow], fields: Sequence[str]) -> None:
    step = max(1, (len(best) - 1) / (MAX_NAMES - 1))
    chosen = {round(at * step) for at in range(MAX_NAMES)} & set(range(len(best)))
    middle = (best[0].metrics["median_ms"] + best[-1].metrics["median_ms"]) / 2
    for number, at in enumerate(sorted(chosen)):
        (ms,), (mib,) = _places([best[at]])
        left = len(best) > 1 and ms > middle
        axes.annotate(
            data.strategy(best[at], fields), (ms, mib), ha="right" if left else "left",
            xytext=(-5 if left else 5, -11 if number % 2 else 5), textcoords="offset points",
            fontsize=7.5, annotation_clip=False,
        )  # fmt: skip
