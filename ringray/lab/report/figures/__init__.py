"""Figures of a sweep: what its trials measured, drawn to decide from.

throughput, memory  a metric by sequence length (lines)
speedup             the ring against the baseline
pareto              time against memory
blocks              time by block sizes
curves              of trainings, by step
scores              of a trained task, by length and depth
data                points, problems and strategies that the figures show
lines               what throughput and memory share
style               how figures look

To add one, write ``<name>.py`` here with a function ``draw(points)`` that returns a chart of
Altair, or None where the sweep does not vary what it would show, and add its title to
:data:`TITLES`. ``points`` are the result of ``data.points`` for the store's rows; a figure sees
nothing else, so it is the same whenever it is drawn. The contract suite
(``tests/contracts/test_figures.py``) then runs over it.

altair is imported when a figure is drawn, not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ringray.lab.report.figures.data import points
from ringray.lab.trial.outcome import TrialRow

if TYPE_CHECKING:
    from ringray.lab.report.figures.style import Chart

TITLES: dict[str, str] = {
    "throughput": "Throughput by length",
    "memory": "Peak memory by length",
    "speedup": "Speed-up over the baseline",
    "pareto": "Time against memory",
    "blocks": "Time by block sizes",
    "curves": "Training curves",
    "scores": "Score of a trained task",
}
"""Name -> title, in the order in which a person reads them."""


def charts(rows: Sequence[TrialRow]) -> Iterator[tuple[str, Chart]]:
    """Yields the name and the chart of each figure for which the trials of a sweep have data."""
    measured = points(rows)
    for name in TITLES:
        chart = importlib.import_module(f"{__name__}.{name}").draw(measured)
        if chart is not None:
            yield name, chart


def pictures(rows: Sequence[TrialRow]) -> Iterator[tuple[str, bytes]]:
    """Yields the name and the PNG of each figure for which the trials of a sweep have data."""
    from ringray.lab.report.figures import style

    for name, chart in charts(rows):
        yield name, style.png(chart)
