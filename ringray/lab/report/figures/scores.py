"""Scores of a trained task by length and depth, a heat map per training; where a task has no
depths, by the length of the training."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from ringray.lab.report import words
from ringray.lab.report.figures import data, lines, style
from ringray.lab.trial.metrics import SCORE
from ringray.lab.trial.outcome import TrialRow


def by_length(point: TrialRow) -> dict[int, list[float]]:
    """Returns the scores of a training by depth, at each length it was examined at."""
    names = (name for name in point.samples if name.startswith(f"{SCORE} "))
    return {int(name.split()[-1]): point.samples[name] for name in names}


def draw(points: Sequence[TrialRow]) -> style.Chart | None:
    """Draws at most ``data.MAX_PANELS`` trainings; None without a task."""
    examined = [point for point in data.having(points, SCORE) if by_length(point)]
    deep = [point for point in examined if any(len(row) > 1 for row in by_length(point).values())]
    if not deep:
        return lines.chart(
            examined, SCORE, "Score by the length of the training", lambda _: (1, SCORE)
        )
    varying = words.varying((point.config for point in deep), ("ring_size", *words.PROBLEM))
    shown = deep[: data.MAX_PANELS]
    tallest = max(len(by_length(point)) for point in shown)
    panels = [
        _heat(f"trained: {data.problem(point, varying)}", by_length(point)) for point in shown
    ]
    left_out = len(deep) - len(shown)
    return style.grid(panels, "Score by length and depth", left_out, max(90, 32 * tallest))


def _heat(title: str, rows: dict[int, list[float]]) -> style.Layers:
    parts = max(map(len, rows.values()))
    records = []
    for length, row in rows.items():
        for depth, score in enumerate(row):
            cell = {"value": score, "text": f"{score:.0%}", "dark": score <= 0.5}
            records.append({"depth": depth, "length": style.tokens(length), **cell})
    ends = f"datum.value == 0 ? 'first' : datum.value == {parts - 1} ? 'last' : ''"
    lengths = [style.tokens(length) for length in sorted(rows, reverse=True)]
    scale = alt.Scale(scheme="cividis", domain=[0, 1])
    axis = alt.Axis(labelExpr=ends, labelAngle=0)
    x = alt.X("depth:O", title="depth of what is asked for", axis=axis)
    y = alt.Y("length:N", title="sequence length (tokens)", sort=lengths)
    shade = alt.Color("value:Q", scale=scale, legend=alt.Legend(title="score", format=".0%"))
    return style.heat(records, x, y, shade, style.tip(length="length", text="score"), title)
