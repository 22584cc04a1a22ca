"""Data of the figures: the measured points of a sweep, and their panels.

Pure functions of the store's rows. A *problem* is the computation, a *strategy* a way to do it:
points of one problem may be compared, points of one strategy make a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ringray.lab.report import words
from ringray.lab.report.replicas import by_problem, merged
from ringray.lab.trial.outcome import TrialRow

MAX_PANELS = 6
_UNNAMED = ("partition", "transport")  # the name of a strategy where there is only one


class Panel(NamedTuple):
    """The points of one set of axes."""

    title: str  # the values that tell it from other panels
    points: Sequence[TrialRow]


def points(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Returns the points with an ok trial, in the order of the plan: of each the median over its
    replicas of every metric that is finite."""
    return merged(row for row in rows if row.status == "ok")


def having(points: Iterable[TrialRow], *metrics: str) -> list[TrialRow]:
    """Returns the points that have all of ``metrics``."""
    return [point for point in points if all(name in point.metrics for name in metrics)]


def panels(points: Sequence[TrialRow], beside: Sequence[str] = ()) -> tuple[list[Panel], int]:
    """Returns the points by problem, and the number of problems left out.

    ``beside``: fields of the problem that the axes show, so panels do not differ in them. Of more
    than ``MAX_PANELS`` problems those with the most points are kept, the longest sequences first
    among equals.
    """
    fields = [name for name in words.PROBLEM if name not in beside]
    varying = words.varying((point.config for point in points), fields)
    problems = by_problem(points, varying)
    best = sorted(problems, key=lambda same: (-len(same), -same[0].config.get("seq_len", 0)))
    shown = [
        Panel(problem(same[0], varying), same) for same in problems if same in best[:MAX_PANELS]
    ]
    return shown, len(problems) - len(shown)


def strategies(points: Sequence[TrialRow]) -> tuple[str, ...]:
    """Returns the fields of the strategy in which ``points`` differ."""
    return words.varying((point.config for point in points), words.STRATEGY)


def strategy(point: TrialRow, fields: Sequence[str]) -> str:
    """Names a point's strategy by the fields in which strategies differ."""
    return words.label(point.config, fields or _UNNAMED)


def problem(point: TrialRow, fields: Sequence[str]) -> str:
    """Names a point's problem by the fields in which problems differ."""
    config = {**point.config, "seq_len": f"{point.config['seq_len']:,} tokens"}
    return words.label(config, fields)
