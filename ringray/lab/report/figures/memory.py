"""Peak memory of the largest rank against the sequence length, a line per strategy."""

from __future__ import annotations

from collections.abc import Sequence

from ringray.base.units import GIB, MIB
from ringray.lab.report.figures import lines, style
from ringray.lab.report.figures.data import Panel
from ringray.lab.trial.outcome import TrialRow


def draw(points: Sequence[TrialRow]) -> style.Figure | None:
    """Draws MiB or GiB per rank on logarithmic axes; None where no length varies."""
    return lines.chart(points, "peak_memory_bytes", "Peak memory by length", _unit, _logarithmic)


def _unit(most: float) -> tuple[float, str]:
    size, name = (GIB, "GiB") if most >= 4 * GIB else (MIB, "MiB")
    return size, f"peak memory per rank ({name})"


def _logarithmic(axes: style.Axes, _panel: Panel, _size: float) -> None:
    """Puts ticks at 1, 2 and 5 times powers of ten, without exponents."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
