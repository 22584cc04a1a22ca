"""Replicas of one point, seen as one measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ringray.lab.trial.outcome import TrialRow

_T = TypeVar("_T")
_WIDEST: dict[str, Callable[[Iterable[float]], float]] = {"p20_ms": min, "p80_ms": max}


def by_point(of: Iterable[_T], config: Callable[[_T], Mapping[str, Any]]) -> list[list[_T]]:
    """What differs in nothing but the replica, together; in the order of the first ones."""
    groups: dict[str, list[_T]] = {}
    for one in of:
        groups.setdefault(repr({**config(one), "replica": 0}), []).append(one)
    return list(groups.values())


def together(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's median over those that have it, finite; the widest spread."""
    names = dict.fromkeys(name for one in metrics for name in one)
    found = {
        name: [one[name] for one in metrics if math.isfinite(one.get(name, math.nan))]
        for name in names
    }
    return {
        name: _WIDEST.get(name, statistics.median)(values)
        for name, values in found.items()
        if values
    }


def merged(rows: Iterable[TrialRow]) -> list[TrialRow]:
    """A row for each point: its replicas that are ok as one. The others stay as they are."""
    made = []
    for same in by_point(rows, lambda row: row.config):
        measured = [row for row in same if row.status == "ok"]
        if measured:
            metrics = together([row.metrics for row in measured])
            made.append(replace(measured[0], metrics=metrics))
        made += [row for row in same if row.status != "ok"]
    return made
