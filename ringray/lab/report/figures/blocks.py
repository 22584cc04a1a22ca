"""Time by block sizes: for Triton query rows by key rows of each kernel, for ATen rows by threads.

A cell is the fastest of all trials that share its two sizes, whatever else they vary (warps, stages
and path are named in it, for the one that was fastest).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
        cut = [point for point in panel.points if point.config.get("blocks") is not None]
        default = min(
            (p.metrics["median_ms"] for p in panel.points if p.config.get("blocks") is None),
            default=None,
        )
        rows = _collect((p, (p.config["blocks"], p.config["threads"]), "") for p in cut
                        if isinstance(p.config["blocks"], int))  # fmt: skip
        if len({x for x, _ in rows}) > 1:
            title = panel.title or "ATen"
            made.append(Map(title, "query rows per call", "threads per rank", rows, default))
        texts = [(p, Blocks.parse(p.config["blocks"])) for p in cut
                 if isinstance(p.config["blocks"], str)]  # fmt: skip
        for kernel in KERNELS:
            tiles = _collect(
                (point, (one.block_n, one.block_m), _detail(str(one)))
                for point, blocks in texts
                if (one := blocks.given.get(kernel)) is not None
            )
            if len(tiles) > 1:
                title = f"{panel.title}: {kernel}" if panel.title else kernel
                made.append(Map(title, "key rows", "query rows", tiles, default))
    return made[: data.MAX_PANELS], left_out + max(0, len(made) - data.MAX_PANELS)


def _detail(text: str) -> str:
    """Returns ``128x64/8/2/split`` without its sizes."""
    return text.partition("/")[2]


def _collect(
    trials: Iterable[tuple[TrialRow, tuple[int, int], str]],
) -> dict[tuple[int, int], Cell]:
    cells: dict[tuple[int, int], Cell] = {}
    for point, place, detail in trials:
        cell = Cell(point.metrics["median_ms"], detail)
        if place not in cells or cell < cells[place]:
            cells[place] = cell
    return cells


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
