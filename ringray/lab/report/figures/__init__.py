"""Figures of a sweep, as PNG: what its trials measured, drawn to decide from.

To add one, write ``<name>.py`` here with a function ``draw(points)`` that returns a Figure, or None
where the sweep does not vary what it would show, and add its module path to :data:`FIGURES` and
what to call it to :data:`TITLES`. ``points`` are what ``data.points`` makes of the store's rows; a
figure sees nothing else, so it is the same whenever it is drawn. How figures look is in ``style``.
The contract suite (``tests/contracts/test_figures.py``) then runs over it.

matplotlib is imported when a figure is drawn, and never before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ringray.lab.report.figures.data import points

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ringray.lab.trial.outcome import TrialRow

FIGURES: dict[str, str] = {
    "throughput": "ringray.lab.report.figures.throughput",
    "memory": "ringray.lab.report.figures.memory",
    "speedup": "ringray.lab.report.figures.speedup",
    "pareto": "ringray.lab.report.figures.pareto",
    "blocks": "ringray.lab.report.figures.blocks",
}
"""Name -> module, in the order in which a person looks at them."""

TITLES: dict[str, str] = {
    "throughput": "Throughput by length",
    "memory": "Peak memory by length",
    "speedup": "Speed-up over the baseline",
    "pareto": "Time against memory",
    "blocks": "Time by block sizes",
}


def pictures(rows: Sequence[TrialRow]) -> Iterator[tuple[str, bytes]]:
    """The name and the PNG of each figure that ``rows``, the trials of one sweep, have data for."""
    from ringray.lab.report.figures import style

    found = points(rows)
    for name, module in FIGURES.items():
        figure = importlib.import_module(module).draw(found)
        if figure is not None:
            yield name, style.png(figure)
