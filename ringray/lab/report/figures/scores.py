"""Scores of a trained task by length and depth, a heat map per training; where a task has no
depths, by the length of the training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ringray.lab.report import words
from ringray.lab.report.figures import data, style
from ringray.lab.trial.metrics import SCORE
from ringray.lab.trial.outcome import TrialRow


def by_length(point: TrialRow) -> dict[int, list[float]]:
    """Returns the scores of a training by depth, at each length it was examined at."""
    names = (name for name in point.samples if name.startswith(f"{SCORE} "))
    return {int(name.split()[-1]): point.samples[name] for name in names}


def draw(points: Sequence[TrialRow]) -> style.Figure | None:
    """Draws at most ``data.MAX_PANELS`` trainings; None without a task."""
    found = [point for point in data.having(points, SCORE) if by_length(point)]
    deep = [point for point in found if any(len(row) > 1 for row in by_length(point).values())]
    if not deep:
        return _lines(found)
    varying = words.varying((point.config for point in deep), ("ring_size", *words.PROBLEM))
    shown = deep[: data.MAX_PANELS]
    titles = [f"trained: {data.problem(point, varying)}" for point in shown]
    figure, axes = style.grid(titles, "Score by length and depth", len(deep) - len(shown))
    for point, at in zip(shown, axes, strict=True):
        _heat(at, by_length(point))
    return figure


def _heat(axes: style.Axes, rows: dict[int, list[float]]) -> None:
    lengths = sorted(rows)
    values = [rows[length] for length in lengths]
    axes.imshow(values, cmap="cividis", vmin=0, vmax=1, origin="lower", aspect="auto")
    for y, row in enumerate(values):
        for x, score in enumerate(row):
            ink = style.INK if score > 0.5 else "white"
            axes.text(x, y, f"{score:.0%}", ha="center", va="center", fontsize=7, color=ink)
    parts = max(map(len, values))
    axes.set_xticks([-0.5, parts - 0.5], ["first", "last"])
    axes.set_yticks(range(len(lengths)), [style.tokens(length) for length in lengths])
    axes.grid(visible=False)
    axes.set_xlabel("depth of what is asked for")
    axes.set_ylabel("sequence length (tokens)")


def _lines(found: Sequence[TrialRow]) -> style.Figure | None:
    """Draws the medians by length; None where no length varies."""
    scores: dict[int, list[float]] = {}
    for point in found:
        scores.setdefault(point.config["seq_len"], []).append(point.metrics[SCORE])
    if len(scores) < 2:
        return None
    figure, (axes,) = style.grid([""], "Score by the length of the training", 0)
    lengths = sorted(scores)
    axes.plot(lengths, [statistics.median(scores[one]) for one in lengths], **next(style.looks()))
    style.lengths(axes, lengths)
    axes.set_ylim(0, 1)
    axes.set_ylabel("score")
    return figure
