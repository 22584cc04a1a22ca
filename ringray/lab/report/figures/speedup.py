"""Speed-up of each strategy over the baseline: bars by sequence length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ringray.lab.report import words
from ringray.lab.report.figures import data, style
from ringray.lab.report.figures.data import Panel
from ringray.lab.trial.outcome import TrialRow

MAX_STRATEGIES = 12
MAX_LENGTHS = 4
# Light to dark: a longer sequence is a darker bar, in print too.
_SHADES = ("#9ecae1", "#4292c6", "#2171b5", "#08306b")


class Bars(NamedTuple):
    """Speed-ups of one panel by strategy and length, in the order of their times: the fastest at
    the greatest length first."""

    names: list[str]
    lengths: list[int]
    values: dict[tuple[str, int], float]


def bars(panel: Panel, fields: Sequence[str]) -> Bars:
    """Returns at most ``MAX_STRATEGIES`` strategies and the ``MAX_LENGTHS`` greatest lengths."""
    values: dict[tuple[str, int], float] = {}
    times: dict[tuple[str, int], float] = {}
    for point in panel.points:
        at = data.strategy(point, fields), point.config["seq_len"]
        values[at], times[at] = 1 / point.metrics["ratio"], point.metrics["median_ms"]
    lengths = sorted({length for _, length in values})[-MAX_LENGTHS:]
    names = list(dict.fromkeys(name for name, _ in values))
    names.sort(key=lambda name: [times.get((name, length), math.inf) for length in lengths[::-1]])
    return Bars(names[:MAX_STRATEGIES], lengths, values)


def draw(points: Sequence[TrialRow]) -> style.Figure | None:
    """Draws 1 / ratio; None without a baseline or with a single strategy."""
    timed = data.having(points, "ratio", "median_ms")
    shown = [point for point in timed if point.metrics["ratio"] > 0]
    fields = data.strategies(shown)
    panels, left_out = data.panels(shown, beside=("seq_len",))
    if not fields or not panels:
        return None
    drawn = [bars(panel, fields) for panel in panels]
    baseline = words.baseline(shown[0].config) or "the baseline"
    tallest = max(len(one.names) * (len(one.lengths) + 1) for one in drawn)
    size = (3.9, max(2.0, 0.9 + 0.13 * tallest))
    titles = [one.title for one in panels]
    figure, axes = style.grid(titles, f"Speed-up over {baseline}", left_out, size)
    for one, found in zip(axes, drawn, strict=True):
        _panel(one, found)
        one.axvline(1.0, color=style.INK, linewidth=1.1)
        one.set_xlabel("times as fast (line: equal)")
    style.legend(figure, axes)
    return figure


def _panel(axes: style.Axes, found: Bars) -> None:
    shades = _SHADES[-len(found.lengths) :] if len(found.lengths) > 1 else _SHADES[1:2]
    height = 0.84 / len(found.lengths)
    for at, (length, shade) in enumerate(zip(found.lengths, shades, strict=True)):
        ys, widths = [], []
        for row, name in enumerate(found.names):
            if (name, length) in found.values:
                ys.append(row - 0.42 + (at + 0.5) * height)
                widths.append(found.values[name, length])
        drawn = axes.barh(ys, widths, height, color=shade, label=f"{style.tokens(length)} tokens")
        dark = shade in _SHADES[1:]
        axes.bar_label(
            drawn, fmt="%.2f", padding=-20, fontsize=7, color="white" if dark else style.INK
        )
    axes.set_ylim(-0.6, len(found.names) - 0.4)
    axes.set_yticks(range(len(found.names)), found.names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    most = max(value for (name, _), value in found.values.items() if name in found.names)
    axes.set_xlim(0, max(1.1, most * 1.15))
