"""Training curves: what each training reports of its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt

from ringray.lab.report import words
from ringray.lab.report.figures import data, style
from ringray.lab.trial.metrics import METRICS, of_group
from ringray.lab.trial.outcome import TrialRow

MAX_LINES = 8
_STEPS = 150  # points of a curve


def draw(points: Sequence[TrialRow]) -> style.Chart | None:
    """Draws a panel per metric with a line for each of the best trainings; None without steps."""
    names = [name for name in of_group("training") if any(curve(point, name) for point in points)]
    if not names:
        return None
    trained = [point for point in points if any(curve(point, name) for name in names)]
    sign = 1 if METRICS[names[0]].less_is_better else -1

    def rank(point: TrialRow) -> float:
        values = curve(point, names[0])
        return sign * values[-1][1] if values else math.inf  # those without one come last

    trained.sort(key=rank)
    shown = trained[:MAX_LINES]
    fields = words.varying(point.config for point in trained)
    labels = {point.key: words.label(point.config, fields) or "training" for point in shown}
    looks = style.looks(list(dict.fromkeys(labels.values())))
    panels = [_panel(name, shown, labels, looks) for name in names[: data.MAX_PANELS]]
    best = f", the best {MAX_LINES} of {len(trained)}" if len(trained) > MAX_LINES else ""
    return style.grid(panels, f"Training curves{best}")


def curve(point: TrialRow, name: str) -> list[tuple[int, float]]:
    """Returns step and value, at most ``_STEPS`` of them; [] where it is not reported by step."""
    values = point.samples.get(name, [])
    every = -(-len(values) // _STEPS) or 1  # rounded up
    thinned = [(index + 1, value) for index, value in enumerate(values) if (index + 1) % every == 0]
    return [pair for pair in thinned if math.isfinite(pair[1])] if len(values) > 1 else []


def _panel(
    name: str, points: Sequence[TrialRow], labels: dict[str, str], looks: dict[str, alt.Color]
) -> style.Layers:
    records = [
        {"strategy": labels[point.key], "step": step, "value": value}
        for point in points
        for step, value in curve(point, name)
    ]
    unit = METRICS[name].unit
    title = name.replace("_", " ") + (f" ({unit})" if unit not in ("", "share", "ratio") else "")
    scale = alt.Scale(zero=False)
    x = alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1), scale=scale)
    base = alt.Chart().encode(x=x, y=alt.Y("value:Q", title=title, scale=scale))
    line = base.mark_line(strokeWidth=1.8)
    line = line.encode(color=looks["color"], strokeDash=looks["strokeDash"])
    tip = style.tip(strategy="training", step="step", value=title)
    near = line.mark_point(size=60, opacity=0, filled=True).encode(tooltip=tip)
    return style.panel(records, line, near)
