"""Data of the figures: the measured points of a sweep, and their panels.

Pure functions of the store's rows. A *problem* is the computation, a *strategy* a way to do it:
points of one problem may be compared, points of one strategy make a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ringray.lab.report import words
from ringray.lab.report.replicas import by_point, together
from ringray.lab.trial.outcome import TrialRow

MAX_PANELS = 6
_UNNAMED = ("partition", "transport")  # the name of a strategy where there is only one


@dataclass(frozen=True)
class FigurePoint:
    """One configuration and the median over its replicas of each metric that is finite."""

    config: dict[str, Any]
    metrics: dict[str, float]

    def values(self, fields: Sequence[str]) -> tuple[str, ...]:
        """Returns the values of ``fields``, comparable and hashable."""
        return tuple(repr(self.config.get(name)) for name in fields)


@dataclass(frozen=True)
class Panel:
    """The points of one set of axes; ``title``: the values that tell it from other panels."""

    title: str
    points: tuple[FigurePoint, ...]


def points(rows: Sequence[TrialRow]) -> list[FigurePoint]:
    """Returns the points with an ok trial, in the order of the plan."""
    ok = [row for row in rows if row.status == "ok"]
    return [
        FigurePoint(same[0].config, together([row.metrics for row in same]))
        for same in by_point(ok, lambda row: row.config)
    ]


def having(found: Iterable[FigurePoint], *metrics: str) -> list[FigurePoint]:
    """Returns the points that have all of ``metrics``."""
    return [point for point in found if all(name in point.metrics for name in metrics)]


def panels(found: Sequence[FigurePoint], beside: Sequence[str] = ()) -> tuple[list[Panel], int]:
    """Returns the points by problem, and the number of problems left out.

    ``beside``: fields of the problem that the axes show, so panels do not differ in them. Of more
    than ``MAX_PANELS`` problems those with the most points are kept, the longest sequences first
    among equals.
    """
    varying = [name for name in _varying(found, words.PROBLEM) if name not in beside]
    by_problem: dict[tuple[str, ...], list[FigurePoint]] = {}
    for point in found:
        by_problem.setdefault(point.values(varying), []).append(point)
    best = sorted(
        by_problem.values(), key=lambda same: (-len(same), -same[0].config.get("seq_len", 0))
    )[:MAX_PANELS]
    kept = [
        Panel(problem(same[0], varying), tuple(same))
        for same in by_problem.values()
        if any(same is one for one in best)
    ]
    return kept, len(by_problem) - len(kept)


def strategies(found: Sequence[FigurePoint]) -> tuple[str, ...]:
    """Returns the fields of the strategy in which ``found`` differ."""
    return _varying(found, words.STRATEGY)


def strategy(point: FigurePoint, fields: Sequence[str]) -> str:
    """Names a point's strategy by the fields in which strategies differ."""
    return words.label(point.config, fields or _UNNAMED)


def problem(point: FigurePoint, fields: Sequence[str]) -> str:
    """Names a point's problem by the fields in which problems differ."""
    config = {**point.config, "seq_len": f"{point.config['seq_len']:,} tokens"}
    return words.label(config, fields)


def _varying(found: Iterable[FigurePoint], fields: Sequence[str]) -> tuple[str, ...]:
    among = words.varying(point.config for point in found)
    return tuple(name for name in among if name in fields)
