"""A metric over the sequence length, a line per strategy: throughput and memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringray.lab.report.figures import data, style
from ringray.lab.report.figures.data import Panel
from ringray.lab.trial.metrics import METRICS
from ringray.lab.trial.outcome import TrialRow

MAX_LINES = 8


class Line(NamedTuple):
    """A strategy's values by length, shortest first."""

    name: str
    xs: list[int]
    ys: list[float]


def chart(
    points: Sequence[TrialRow],
    metric: str,
    title: str,
    unit: Callable[[float], tuple[float, str]],
    finish: Callable[[style.Axes, Panel, float], None],
) -> style.Figure | None:
    """Draws ``metric`` in panels; None where no length varies.

    ``unit``: the size and the axis label of the unit for the largest value. ``finish``: adds to the
    axes of a panel what this metric needs; its last argument is the size.
    """
    panels, left_out = varying_lengths(points, metric)
    if not panels:
        return None
    shown = [point for panel in panels for point in panel.points]
    size, label = unit(max(point.metrics[metric] for point in shown))
    fields = data.strategies(shown)
    # A strategy looks the same in every panel, and in every figure of a sweep.
    names = dict.fromkeys(data.strategy(point, fields) for point in shown)
    looks = dict(zip(names, style.looks(), strict=False))
    figure, axes = style.grid([one.title for one in panels], title, left_out)
    for panel, one in zip(panels, axes, strict=True):
        found = lines(panel, fields, metric, size)
        for line in found:
            one.plot(line.xs, line.ys, label=line.name, **looks[line.name])
        finish(one, panel, size)
        style.lengths(one, [x for line in found for x in line.xs])
        one.set_ylabel(label)
    style.legend(figure, axes)
    return figure


def varying_lengths(found: Sequence[TrialRow], metric: str) -> tuple[list[Panel], int]:
    """Returns the panels in which the length varies, and the number of problems left out."""
    every, left_out = data.panels(data.having(found, metric), beside=("seq_len",))
    kept = [one for one in every if len({p.config["seq_len"] for p in one.points}) > 1]
    return kept, left_out + len(every) - len(kept) if kept else 0


def lines(panel: Panel, fields: Sequence[str], metric: str, size: float = 1.0) -> list[Line]:
    """Returns at most ``MAX_LINES`` strategies, the best at its greatest length first.

    ``fields``: the fields in which strategies differ. ``size``: of the unit.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for point in panel.points:
        value = point.metrics[metric] / size
        found.setdefault(data.strategy(point, fields), []).append((point.config["seq_len"], value))
    made = []
    for name, pairs in found.items():
        xs, ys = zip(*sorted(pairs), strict=True)
        made.append(Line(name, list(xs), list(ys)))
    sign = 1 if METRICS[metric].less_is_better else -1
    made.sort(key=lambda line: (-line.xs[-1], sign * line.ys[-1]))
    return made[:MAX_LINES]
