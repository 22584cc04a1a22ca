"""Style of figures: light, units on each axis, colours and marks for colour-blind readers too.

The only module of the figures with settings of matplotlib. Figures are made without pyplot: without
a display and without global state.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

__all__ = ["Axes", "Figure"]

# Paul Tol's "bright", made for colour-blind readers; each also has its own mark.
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#000000", "#999933")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
BASELINE = "#888888"
GRID = "#dddddd"
INK = "#1a1a1a"
PALE = "#555555"
# Two panels of this size are as wide as MLflow's column for descriptions.
_DPI = 100
_PANEL = (3.9, 2.9)  # inches
_COLUMNS = 2
_SETTINGS: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # part of matplotlib, so the same on every machine
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.7,
    "lines.markersize": 5,
    "text.color": INK,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def settings() -> AbstractContextManager[None]:
    """Applies the settings above while a figure is drawn."""
    return mpl.rc_context(_SETTINGS)


def png(figure: Figure) -> bytes:
    """Returns the figure as PNG, without a date or the name of a program."""
    out = io.BytesIO()
    with settings():
        figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})
    return out.getvalue()


def grid(
    titles: Sequence[str], title: str, left_out: int, size: tuple[float, float] = _PANEL
) -> tuple[Figure, list[Axes]]:
    """Returns a figure with axes of ``size`` inches for each of ``titles``, ``_COLUMNS`` in a
    row."""
    columns = min(len(titles), _COLUMNS)
    rows = math.ceil(len(titles) / columns)
    width = size[0] * columns if columns > 1 else size[0] * 1.5
    figure = Figure(figsize=(width, size[1] * rows + 0.5), layout="constrained")
    if left_out:
        title += f"  (and {left_out} more problems: see the table)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure, [
        figure.add_subplot(rows, columns, at, title=name) for at, name in enumerate(titles, 1)
    ]


def looks() -> Iterator[dict[str, Any]]:
    """Yields colour and mark of each line; lines after the last colour are dashed."""
    for dash in itertools.cycle(("-", "--", ":")):
        for colour, mark in zip(COLOURS, MARKS, strict=True):
            yield {"color": colour, "marker": mark, "linestyle": dash}


def lengths(axes: Axes, values: Sequence[float]) -> None:
    """Makes the x axis logarithmic, with ticks at (some of) the sequence lengths."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(values))
    step = math.ceil(len(ticks) / 7)
    axes.xaxis.set_major_locator(FixedLocator(ticks[::-1][::step][::-1]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tokens(x)))
    axes.set_xlabel("sequence length (tokens)")


def tokens(count: float) -> str:
    """Writes ``8192`` as ``8k``; a length that is not a multiple of 1024 in full."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count / size:.0f}{unit}"
    return f"{count:,.0f}"


def legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """Puts one legend of all panels below them."""
    known: dict[str, Any] = {}
    for one in axes:
        for handle, text in zip(*one.get_legend_handles_labels(), strict=True):
            known.setdefault(text, handle)
    if len(known) < 2:
        return
    widest = max(map(len, known))
    columns = max(1, min(len(known), int(figure.get_figwidth() * 12 / (widest + 6))))
    figure.legend(list(known.values()), list(known), loc="outside lower left", ncols=columns)
