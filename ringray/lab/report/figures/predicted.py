"""Predicted against actual times and memory, with the line on which both are equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt

from ringray.base.units import MIB
from ringray.lab.report.figures import data, style
from ringray.lab.report.palette import LINES
from ringray.lab.trial.metrics import METRICS
from ringray.lab.trial.outcome import TrialRow

_SHOWN = {  # metric -> title of its panel, unit, size of the unit
    "median_ms": ("Time", "ms", 1.0),
    "peak_memory_bytes": ("Memory per rank", "MiB", MIB),
}
_Predicted = tuple[TrialRow, float]
_MOST = 1000  # points of a panel
_NAMED = 8  # strategies that have their own colours


def draw(points: Sequence[TrialRow]) -> style.Chart | None:
    """Draws logarithmic axes; None where fewer than two points were predicted."""
    by_metric = {name: pairs for name in _SHOWN if len(pairs := predictions(points, name)) > 1}
    if not by_metric:
        return None
    shown = [point for pairs in by_metric.values() for point, _ in pairs]
    fields = data.strategies(shown)
    names = list(dict.fromkeys(data.strategy(point, fields) for point in shown))
    panels = [_panel(name, pairs, fields, names) for name, pairs in by_metric.items()]
    return style.grid(panels, "Predicted against measured, on the line both are equal", height=280)


def predictions(points: Sequence[TrialRow], metric: str) -> list[_Predicted]:
    """Returns the points with a prediction of ``metric``, each with it."""
    field = METRICS[metric].predicted
    values = ((point, point.predicted.get(field)) for point in data.having(points, metric))
    return [
        (point, float(value))
        for point, value in values
        if isinstance(value, int | float) and 0 < value < math.inf and point.metrics[metric] > 0
    ]


def _panel(
    metric: str, pairs: Sequence[_Predicted], fields: Sequence[str], names: Sequence[str]
) -> style.Layers:
    title, unit, size = _SHOWN[metric]
    records: style.Records = []
    every = -(-len(pairs) // _MOST)  # rounded up
    for point, value in pairs[::every]:
        name, length = data.strategy(point, fields), style.tokens(point.config["seq_len"])
        place = {"x": value / size, "y": point.metrics[metric] / size}
        records.append({"strategy": name, "tokens": length, **place})
    values = [record[axis] for record in records for axis in ("x", "y")]
    least, most = min(values) / 1.3, max(values) * 1.3
    scale = alt.Scale(type="log", domain=[least, most], nice=False)
    axis = alt.Axis(values=style.log_ticks(least, most))
    base = alt.Chart().encode(
        x=alt.X("x:Q", title=f"predicted ({unit})", scale=scale, axis=axis),
        y=alt.Y("y:Q", title=f"measured ({unit})", scale=scale, axis=axis),
    )
    tip = style.tip(strategy="strategy", tokens="length", x="predicted", y="measured")
    marks = base.mark_point(size=40, opacity=0.8, color=LINES[0]).encode(tooltip=tip)
    if 1 < len(names) <= _NAMED:
        looks = style.looks(names)
        marks = marks.encode(color=looks["color"], shape=looks["shape"])
    line = alt.Chart().mark_rule(color=style.BACK, strokeDash=[5, 4])
    begin, end = alt.datum(least), alt.datum(most)
    line = line.encode(x=begin, y=begin, x2=end, y2=end)
    return style.panel(records, line, marks, title=title)
