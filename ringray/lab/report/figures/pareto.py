"""Time against peak memory: the strategies that no other beats in both, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from ringray.base.units import MIB
from ringray.lab.report.figures import data, style
from ringray.lab.report.palette import LINES
from ringray.lab.search.base import layers
from ringray.lab.trial.outcome import TrialRow

MAX_NAMES = 6  # per panel: the front's ends and points evenly between them
_AXES = ("median_ms", "peak_memory_bytes")
_FRONT, _BEATEN = "Pareto front", "other points"


def draw(points: Sequence[TrialRow]) -> style.Chart | None:
    """Draws the points and the front of each problem; None where memory does not vary."""
    every, left_out = data.panels(data.having(points, *_AXES))
    panels = [
        panel for panel in every if len({p.metrics["peak_memory_bytes"] for p in panel.points}) > 1
    ]
    fields = data.strategies([point for panel in panels for point in panel.points])
    if not panels or not fields:
        return None
    made = [_panel(panel, fields) for panel in panels]
    return style.grid(made, "Time against peak memory, lower left is better", left_out)


def _panel(panel: data.Panel, fields: Sequence[str]) -> style.Layers:
    best = next(layers(panel.points, lambda point: tuple(point.metrics[name] for name in _AXES)))
    times = [point.metrics["median_ms"] for point in panel.points]
    names = _names(best, (min(times) + max(times)) / 2)
    records = [
        {
            "strategy": data.strategy(point, fields),
            "ms": point.metrics["median_ms"],
            "mib": point.metrics["peak_memory_bytes"] / MIB,
            "of": _FRONT if point in best else _BEATEN,
            **names.get(point.key, {}),
        }
        for point in panel.points
    ]
    looks = alt.Scale(domain=[_FRONT, _BEATEN], range=[LINES[0], style.BACK])
    scale = alt.Scale(zero=False, nice=True, padding=24)
    tip = style.tip(strategy="strategy", ms="median time (ms)", mib="peak memory (MiB)")
    base = alt.Chart().encode(
        x=alt.X("ms:Q", title="median time (ms)", scale=scale),
        y=alt.Y("mib:Q", title="peak memory per rank (MiB)", scale=scale),
        color=alt.Color("of:N", scale=looks, legend=alt.Legend(title=None, columns=2)),
    )
    align, right, down = (alt.expr(f"datum.{name}") for name in ("align", "dx", "dy"))
    texts = base.transform_filter("datum.align").mark_text(align=align, dx=right, dy=down)
    texts = texts.encode(text="strategy:N", color=alt.value(style.INK))
    front = base.transform_filter(f"datum.of == '{_FRONT}'").mark_line(interpolate="step-after")
    shapes = alt.Scale(domain=[_FRONT, _BEATEN], range=["circle", "cross"])
    marks = base.mark_point(filled=True, size=50, opacity=1)
    marks = marks.encode(shape=alt.Shape("of:N", scale=shapes), tooltip=tip)
    return style.panel(records, front, marks, texts, title=panel.title)


def _names(best: Sequence[TrialRow], middle: float) -> dict[str, dict[str, str | int]]:
    """Returns the points of a front that are named, by key, and how the name stands beside its
    point: toward the ``middle``, in turns above and below."""
    step = max(1, (len(best) - 1) / (MAX_NAMES - 1))
    chosen = sorted({round(index * step) for index in range(MAX_NAMES)} & set(range(len(best))))
    placed: dict[str, dict[str, str | int]] = {}
    for number, index in enumerate(chosen):
        side = ("right", -7) if best[index].metrics["median_ms"] > middle else ("left", 7)
        placed[best[index].key] = {"align": side[0], "dx": side[1], "dy": 11 if number % 2 else -8}
    return placed
