"""Peak memory of the largest rank against the sequence length, a line per strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringray.base.units import GIB, MIB
from ringray.lab.report.figures import data, lines, style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray.base.units import GIB, MIB
from ringray.lab.report.figures.data import FigurePoint


def draw(points: Sequence[FigurePoint]) -> style.Figure | None:
    """MiB or GiB per rank on logarithmic axes; None where no length varies."""
    panels, left_out = lines.panels(points, "peak_memory_bytes")
    if not panels:
        return None
    shown = [point for panel in panels for point in panel.points]
    most = max(point.metrics["peak_memory_bytes"] for point in shown)
    size, unit = (GIB, "GiB") if most >= 4 * GIB else (MIB, "MiB")
    fields = data.strategies(shown)
    drawn = [
        lines.lines(
            panel, fields, lambda point: point.metrics["peak_memory_bytes"] / size, highest=False
        )
        for panel in panels
    ]
    look = lines.colours(panels, fields)
    with style.Style():
        figure, axes = style.grid(panels, "Peak memory by length", left_out)
        for one, found in zip(axes, drawn, strict=True):
            for line in found:
                one.plot(line.xs, line.ys, label=line.name, **look[line.name])
            style.lengths(one, [x for line in found for x in line.xs])
            one.set_yscale("log")
            style.plain(one, "y")
            one.set_ylabel(f"peak memory per rank ({unit})")
        style.legend(figure, axes)
    return figure
