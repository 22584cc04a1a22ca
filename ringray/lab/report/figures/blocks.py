"""Time by block sizes: for Triton query rows by key rows of each kernel, for ATen rows by threads.

A cell has the least time of all trials that share its two sizes, whatever else they vary (warps,
stages and path are named in it, for that trial). None is marked: figures do not say which times the
samples tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import altair as alt

from ringray.base import units
from ringray.lab.report.figures import data, style
from ringray.lab.trial.outcome import TrialRow
from ringray_kernels.config import KERNELS, Blocks

_MOST = 4.0  # times the least time; slower cells have the same colour


class Cell(NamedTuple):
    """A cell of a heat map."""

    ms: float  # the least time
    detail: str  # its blocks without the sizes


class Map(NamedTuple):
    """A heat map."""

    title: str
    x: str  # names of the axes
    y: str
    cells: dict[tuple[int, int], Cell]  # by their values on the axes
    default_ms: float | None  # the time of the default blocks


def maps(points: Sequence[TrialRow]) -> tuple[list[Map], int]:
    """Returns a map for each problem and kernel with several sizes, and how many are left out."""
    panels, left_out = data.panels(data.having(points, "median_ms"))
    made: list[Map] = []
    for panel in panels:
        default = None
        by_kernel: dict[str, dict[tuple[int, int], Cell]] = {name: {} for name in ("", *KERNELS)}
        for point in panel.points:
            ms, blocks = point.metrics["median_ms"], point.config.get("blocks")
            if blocks is None:
                default = min(ms, default or ms)
            for kernel, place, detail in _cuts(blocks, point.config):
                cell = Cell(ms, detail)
                by_kernel[kernel][place] = min(cell, by_kernel[kernel].get(place, cell))
        rows = by_kernel.pop("")
        if len({x for x, _ in rows}) > 1:
            title = panel.title or "ATen"
            made.append(Map(title, "query rows per call", "threads per rank", rows, default))
        for kernel, tiles in by_kernel.items():
            if len(tiles) > 1:
                title = f"{panel.title}: {kernel}" if panel.title else kernel
                made.append(Map(title, "key rows", "query rows", tiles, default))
    return made[: data.MAX_PANELS], left_out + max(0, len(made) - data.MAX_PANELS)


def _cuts(
    blocks: int | str | None, config: dict[str, Any]
) -> Iterator[tuple[str, tuple[int, int], str]]:
    """Yields kernel ("" for ATen), both sizes and the rest (``8/2/split``) of a point's blocks."""
    if isinstance(blocks, int):
        yield "", (blocks, config["threads"]), ""
    elif blocks is not None:
        for kernel, tiles in Blocks.parse(blocks).given.items():
            yield kernel, (tiles.block_n, tiles.block_m), str(tiles).partition("/")[2]


def draw(points: Sequence[TrialRow]) -> style.Chart | None:
    """Draws a heat map per problem and kernel, darker is slower; None where blocks do not vary."""
    heat_maps, left_out = maps(points)
    if not heat_maps:
        return None
    times = [[cell.ms for cell in heat_map.cells.values()] for heat_map in heat_maps]
    most = max(1.05, min(max(max(ms) / min(ms) for ms in times), _MOST))
    tallest = max(len({y for _, y in heat_map.cells}) for heat_map in heat_maps)
    panels = [_heat(heat_map, most) for heat_map in heat_maps]
    title = "Time by block sizes (ms), light is fast"
    return style.grid(panels, title, left_out, min(360, max(90, 36 * tallest)))


def _heat(heat_map: Map, most: float) -> style.Layers:
    best = min(cell.ms for cell in heat_map.cells.values())
    records = []
    for (x, y), cell in heat_map.cells.items():
        value, text = cell.ms / best, f"{units.digits(cell.ms)}\n{cell.detail}".rstrip()
        looks = {"text": text, "name": cell.detail, "dark": value > (1 + most) / 2}
        records.append({"x": x, "y": y, "value": value, "ms": cell.ms, **looks})
    default = f" (default: {units.digits(ms, ' ms')})" if (ms := heat_map.default_ms) else ""
    legend = alt.Legend(title="time ÷ the least", gradientLength=160)
    scale = alt.Scale(scheme="cividis", domain=[1, most], reverse=True, clamp=True)
    tip = style.tip(ms="ms", value="÷ the least")
    return style.heat(
        records,
        alt.X("x:O", title=heat_map.x + default, axis=alt.Axis(labelAngle=0)),
        alt.Y("y:O", title=heat_map.y, sort="descending"),
        alt.Color("value:Q", scale=scale, legend=legend),
        tip + (style.tip(name="warps, stages, path") if any(c["name"] for c in records) else []),
        heat_map.title,
    )
