"""Contract of every figure of a sweep, whatever it draws."""

from __future__ import annotations

import importlib
import io
import math
from typing import Any

import pytest

from ringray.lab.report.figures import TITLES, data, pictures
from tests.support.figure_rows import SWEEPS, grid, row, timed

SHOWN = {
    "strategies": {"throughput", "memory", "speedup", "pareto"},
    "tiles": {"speedup", "blocks"},
    "cuts": {"speedup", "blocks"},
    "tasks": {"scores"},
    "contexts": {"scores"},
}


def figure(name: str, rows: Any) -> Any:
    return importlib.import_module(f"ringray.lab.report.figures.{name}").draw(data.points(rows))


@pytest.mark.parametrize("sweep", SWEEPS)
@pytest.mark.parametrize("name", TITLES)
def test_it_is_drawn_where_the_sweep_varies_what_it_shows(name: str, sweep: str) -> None:
    drawn = figure(name, SWEEPS[sweep]())
    assert (drawn is not None) == (name in SHOWN[sweep])
    if drawn is None:
        return
    assert drawn.get_suptitle()
    for axes in drawn.axes:
        assert axes.get_xlabel() or axes.get_label() == "<colorbar>"
        assert axes.get_ylabel() or name == "speedup"
        assert axes.has_data()
        for limit in (*axes.get_xlim(), *axes.get_ylim()):
            assert math.isfinite(limit)


@pytest.mark.parametrize("name", TITLES)
def test_nothing_to_show_is_no_figure(name: str) -> None:
    one = row(0, timed(5.0))
    bad = [
        row(1, {}, "failed", seq_len=4096),
        row(2, {}, "oom", partition="zigzag", blocks=64),
        row(3, {"median_ms": math.nan, "tflops": math.inf}, partition="striped", blocks=128),
    ]
    for rows in ([], [one], [one, row(1, timed(6.0), replica=1)], bad, [one, *bad]):
        assert figure(name, rows) is None


@pytest.mark.parametrize("name", TITLES)
def test_the_same_rows_are_the_same_picture(name: str) -> None:
    """Nothing but the rows decides: drawn by `ringray sync` it is what it was after the run."""
    from ringray.lab.report.figures import style

    rows = next(make() for sweep, make in SWEEPS.items() if name in SHOWN[sweep])
    first, second = (style.png(figure(name, rows)) for _ in range(2))
    assert first == second


def test_pictures_are_png_of_modest_size() -> None:
    import matplotlib.image

    for make in SWEEPS.values():
        for name, png in pictures(make()):
            pixels = matplotlib.image.imread(io.BytesIO(png))
            assert len(png) < 300_000, name
            assert 200 < pixels.shape[0] < 2000
            assert 500 < pixels.shape[1] < 1000  # MLflow's column for descriptions
            assert pixels[0, 0, :3].tolist() == [1.0, 1.0, 1.0]  # on white
            assert pixels.std() > 0.05


def test_many_trials_are_not_a_larger_picture() -> None:
    points = grid(
        seq_len=[1024 * (1 + i) for i in range(15)],
        heads=[8, 16],
        partition=["contiguous", "striped", "zigzag", "zigzag-token"],
        transport=[f"hybrid:{1 + i}" for i in range(5)],
    )
    rows = [row(i, timed(5.0 + i % 97, 10.0 + i % 89), **point) for i, point in enumerate(points)]
    drawn = dict(pictures(rows))
    assert set(drawn) == SHOWN["strategies"]
    assert all(len(png) < 600_000 for png in drawn.values())
