"""Contract of every figure of a sweep, whatever it draws."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

from ringray.lab.report.figures import TITLES, data
from tests.support.figure_rows import SWEEPS, row, timed

SHOWN = {
    "strategies": {"throughput", "memory", "speedup", "pareto"},
    "tiles": {"speedup", "blocks"},
    "cuts": {"speedup", "blocks"},
    "tasks": {"curves", "scores"},
    "contexts": {"scores"},
    "trainings": {"curves"},
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
    found = drawn.to_dict()
    assert found["title"]["text"]
    for panel in found["concat"]:
        encodings = [layer["encoding"] for layer in panel["layer"]]
        assert any(one.get("x", {}).get("title") for one in encodings)
        assert (
            any(encoding.get("y", {}).get("title") for encoding in encodings) or name == "speedup"
        )
        assert any("tooltip" in one for one in encodings)
        values = panel.get("data", found.get("data"))["values"]
        assert values
        for value in (value for one in values for value in one.values()):
            assert not isinstance(value, float) or math.isfinite(value)
        for tip in (tip for one in encodings for tip in one.get("tooltip", ())):
            texts = [one[tip["field"]] for one in values if isinstance(one[tip["field"]], str)]
            assert not texts or tip["type"] == "nominal", "a text that is shown as a number"


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
