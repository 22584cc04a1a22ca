"""Lines over the sequence length, one per strategy: what throughput and memory share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ringray.lab.report.figures import data, style
from ringray.lab.report.figures.data import FigurePoint, Panel

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_LINES = 8
Value = Callable[[FigurePoint], float]


class Line(NamedTuple):
    """A strategy's values by length, shortest first."""

    name: str
    xs: list[int]
    ys: list[float]


def panels(found: Sequence[FigurePoint], *metrics: str) -> tuple[list[Panel], int]:
    """Panels of the points that have ``metrics``; those in which no length varies are left out."""
    every, left_out = data.panels(data.having(found, *metrics), beside=("seq_len",))
    kept = [one for one in every if len({p.config["seq_len"] for p in one.points}) > 1]
    return kept, left_out + len(every) - len(kept) if kept else 0


def lines(panel: Panel, fields: Sequence[str], value: Value, highest: bool) -> list[Line]:
    """At most ``MAX_LINES`` strategies, the best at the greatest length of theirs first.

    ``fields``: what strategies differ in. ``highest``: whether more is better.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for point in panel.points:
        name = data.strategy(point, fields)
        found.setdefault(name, []).append((point.config["seq_len"], value(point)))
    made = []
    for name, pairs in found.items():
        xs, ys = zip(*sorted(pairs), strict=True)
        made.append(Line(name, list(xs), list(ys)))
    sign = -1 if highest else 1
    made.sort(key=lambda line: (-line.xs[-1], sign * line.ys[-1]))
    return made[:MAX_LINES]


def colours(panels: Sequence[Panel], fields: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How each strategy looks: the same in every panel, and in every figure of a sweep."""
    names = dict.fromkeys(data.strategy(point, fields) for one in panels for point in one.points)
    return dict(zip(names, style.looks(), strict=False))
