"""A metric over the sequence length, a line per strategy: throughput and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import altair as alt

from ringray.lab.report.figures import data, style
from ringray.lab.report.figures.data import Panel
from ringray.lab.trial.metrics import METRICS
from ringray.lab.trial.outcome import TrialRow

MAX_LINES = 8


def chart(
    points: Sequence[TrialRow],
    metric: str,
    title: str,
    unit: Callable[[float], tuple[float, str]],
    logarithmic: bool = False,
    baseline: Callable[[Panel, float], style.Records] = lambda *_: [],
) -> style.Chart | None:
    """Draws ``metric`` in panels; None where no length varies.

    ``unit``: the size and the axis label of the unit for the largest value. ``logarithmic``: of the
    y axis, which else begins with 0. ``baseline``: the pale line of a panel, in units of its second
    argument.
    """
    panels, left_out = varying_lengths(points, metric)
    if not panels:
        return None
    shown = [point for panel in panels for point in panel.points]
    values = [point.metrics[metric] for point in shown]
    size, label = unit(max(values))
    fields = data.strategies(shown)
    by_panel = [lines(panel, fields, metric, size) for panel in panels]
    beside = [baseline(panel, size) for panel in panels]
    # A strategy looks the same in every panel, and in every figure of a sweep.
    every = dict.fromkeys(data.strategy(point, fields) for point in shown)
    drawn = {record["strategy"] for records in by_panel for record in records}
    pale = next((records[0]["strategy"] for records in beside if records), None)
    looks = style.looks([name for name in every if name in drawn], pale)
    if logarithmic:
        scale = alt.Scale(type="log", nice=False, padding=12)
        axis = alt.Axis(values=style.log_ticks(min(values) / size, max(values) / size))
    else:
        scale, axis = alt.Scale(zero=True), alt.Axis()
    y = alt.Y("value:Q", title=label, scale=scale, axis=axis)
    made = [
        _panel(panel.title, [*own, *pale_line], y, looks, label)
        for panel, own, pale_line in zip(panels, by_panel, beside, strict=True)
    ]
    return style.grid(made, title, left_out)


def _panel(
    title: str, records: style.Records, y: alt.Y, looks: dict[str, alt.Color], label: str
) -> style.Layers:
    x = style.lengths([record["length"] for record in records])
    tip = style.tip(strategy="strategy", tokens="length", value=label)
    if any(record["low"] != record["high"] for record in records):
        tip += style.tip(low="from (p20)", high="to (p80)")
    base = alt.Chart().encode(x=x, y=y, color=looks["color"])
    return style.panel(
        records,
        base.mark_rule(strokeWidth=5, opacity=0.3).encode(y="low:Q", y2="high:Q", tooltip=tip),
        base.mark_line(strokeWidth=2).encode(strokeDash=looks["strokeDash"]),
        base.mark_point(filled=True, size=55, opacity=1).encode(shape=looks["shape"], tooltip=tip),
        title=title,
    )


def varying_lengths(points: Sequence[TrialRow], metric: str) -> tuple[list[Panel], int]:
    """Returns the panels in which the length varies, and the number of problems left out."""
    every, left_out = data.panels(data.having(points, metric), beside=("seq_len",))
    varying = [panel for panel in every if len({p.config["seq_len"] for p in panel.points}) > 1]
    return varying, left_out + len(every) - len(varying) if varying else 0


def lines(panel: Panel, fields: Sequence[str], metric: str, size: float = 1.0) -> style.Records:
    """Returns the points of at most ``MAX_LINES`` strategies, the best at its greatest length
    first, each with the shortest length first.

    ``fields``: the fields in which strategies differ. ``size``: of the unit.
    """
    by_strategy: dict[str, style.Records] = {}
    for point in sorted(panel.points, key=lambda p: (p.config["seq_len"], p.metrics[metric])):
        value = point.metrics[metric] / size
        low, high = (value * factor for factor in spread(point, metric))
        made = record(data.strategy(point, fields), point.config["seq_len"], value, low, high)
        by_strategy.setdefault(made["strategy"], []).append(made)
    sign = 1 if METRICS[metric].less_is_better else -1
    best = sorted(
        by_strategy.values(), key=lambda line: (-line[-1]["length"], sign * line[-1]["value"])
    )
    return [made for line in best[:MAX_LINES] for made in line]


def record(name: str, length: int, value: float, low: float, high: float) -> dict[str, Any]:
    """Returns a point of a line; ``low``, ``high``: the p20 to p80 of its values."""
    place = {"length": length, "tokens": style.tokens(length), "value": value}
    return {"strategy": name, **place, "low": low, "high": high}


def spread(point: TrialRow, metric: str) -> tuple[float, float]:
    """Returns the p80 and p20 of a point's time as factors on ``metric``; 1 of what is no rate."""
    times = [point.metrics.get(name, 0.0) for name in ("p80_ms", "median_ms", "p20_ms")]
    if metric != "tflops" or not all(time > 0 for time in times):
        return 1.0, 1.0
    slow, median, fast = times
    return median / slow, median / fast
