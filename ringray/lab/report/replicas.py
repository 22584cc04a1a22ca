"""Replicas of one point as one measurement, and the points of one problem."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ringray.lab.report.words import PROBLEM
from ringray.lab.trial.metrics import METRICS
from ringray.lab.trial.outcome import TrialRow

_T = TypeVar("_T")


def by_problem(rows: Iterable[TrialRow], fields: Sequence[str] = PROBLEM) -> list[list[TrialRow]]:
    """Groups rows of one problem, as far as ``fields`` tell."""
    return groups(rows, lambda row: [row.config.get(name) for name in fields])


def groups(items: Iterable[_T], key: Callable[[_T], object]) -> list[list[_T]]:
    """Groups items of equal keys, in the order of the first of each group."""
    by_key: dict[str, list[_T]] = {}
    for item in items:
        by_key.setdefault(repr(key(item)), []).append(item)  # keys hold lists: no hash
    return list(by_key.values())


def together(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns one number for each metric: the median of its finite values, or the widest spread."""
    by_name: dict[str, list[float]] = {}
    for name, value in (pair for numbers in metrics for pair in numbers.items()):
        if math.isfinite(value):
            by_name.setdefault(name, []).append(value)
    return {
        name: METRICS[name].replicas(values) if name in METRICS else statistics.median(values)
        for name, values in by_name.items()
    }


def merged(rows: Iterable[TrialRow]) -> list[TrialRow]:
    """Returns one row for the ok replicas of each point, and the other rows as they are."""
    made = []
    for same in groups(rows, lambda row: {**row.config, "replica": 0}):
        measured = [row for row in same if row.status == "ok"]
        if measured:
            metrics = together([row.metrics for row in measured])
            made.append(replace(measured[0], metrics=metrics))
        made += [row for row in same if row.status != "ok"]
    return made
