"""Time by block sizes: for Triton query rows by key rows of each kernel, for ATen rows by threads.

A cell is the fastest of all trials that share its two sizes, whatever else they vary (warps, stages
and path are named in it, for the one that was fastest).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ringray.base import units
from ringray.lab.report.figures import data, style
from ringray.lab.trial.outcome import TrialRow
from ringray_kernels.config import KERNELS, Blocks


class Cell(NamedTuple):
    """The fastest trial of a cell, in milliseconds; ``detail``: its blocks without the sizes."""

    ms: float
    detail: str


class Map(NamedTuple):
    """A heat map: its title, the names of both axes and the cells by (x, y)."""

    title: str
    x: str
    y: str
    cells: dict[tuple[int, int], Cell]
    default_ms: float | None


def maps(found: Sequence[TrialRow]) -> tuple[list[Map], int]:
    """Returns a map for each problem and kernel with several sizes, and how many are left out."""
    panels, left_out = data.panels(data.having(found, "median_ms"))
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
        for kernel, one in Blocks.parse(blocks).given.items():
            yield kernel, (one.block_n, one.block_m), str(one).partition("/")[2]


def draw(points: Sequence[TrialRow]) -> style.Figure | None:
    """Draws a heat map per problem and kernel, darker is slower; None where blocks do not vary."""
    found, left_out = maps(points)
    if not found:
        return None
    titles = [one.title for one in found]
    figure, axes = style.grid(titles, "Time by block sizes, light is fast", left_out)
    for one, at in zip(found, axes, strict=True):
        _heat(figure, at, one)
    return figure


def _heat(figure: style.Figure, axes: style.Axes, one: Map) -> None:
    xs, ys = sorted({x for x, _ in one.cells}), sorted({y for _, y in one.cells})
    best = min(cell.ms for cell in one.cells.values())
    values = [
        [one.cells[x, y].ms / best if (x, y) in one.cells else float("nan") for x in xs]
        for y in ys
    ]  # fmt: skip
    most = min(max(cell.ms / best for cell in one.cells.values()), 4.0)
    image = axes.imshow(
        values, cmap="cividis_r", vmin=1.0, vmax=max(most, 1.05), origin="lower", aspect="auto"
    )
    for (x, y), cell in one.cells.items():
        dark = cell.ms / best > (1 + most) / 2
        text = units.digits(cell.ms, " ms") + (f"\n{cell.detail}" if cell.detail else "")
        axes.text(
            xs.index(x), ys.index(y), text, ha="center", va="center", fontsize=7.5,
            color="white" if dark else style.INK, fontweight="bold" if cell.ms == best else None,
        )  # fmt: skip
    axes.set_xticks(range(len(xs)), [str(x) for x in xs])
    axes.set_yticks(range(len(ys)), [str(y) for y in ys])
    axes.grid(visible=False)
    axes.set_xlabel(one.x if one.default_ms is None else
                    f"{one.x}    (default: {units.digits(one.default_ms, ' ms')})")  # fmt: skip
    axes.set_ylabel(one.y)
    figure.colorbar(image, ax=axes, label="time ÷ the fastest", shrink=0.9)
