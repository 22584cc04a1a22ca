"""Measurements that others published, against their predictions: see ``experiments/published``."""

from __future__ import annotations

import importlib.util
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "experiments" / "published"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.fixture(scope="module")
def run() -> Any:
    spec = importlib.util.spec_from_file_location("published_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables(run: Any) -> dict[str, list[Any]]:
    return {path.stem: run.tables(path) for path in FILES}


def test_the_median_error_is_within_twelve_percent(tables: dict[str, list[Any]]) -> None:
    rows = [row for found in tables.values() for table in found for row in table.rows]
    assert len(rows) > 150
    assert statistics.median(abs(row.ratio - 1) for row in rows) < 0.06  # 4.0%; 12% are asked for
    for found in tables.values():
        of_source = [abs(row.ratio - 1) for table in found for row in table.rows]
        assert statistics.median(of_source) < 0.12


def test_rivals_are_in_order_or_it_is_said_why_not(tables: dict[str, list[Any]]) -> None:
    for found in tables.values():
        for table in found:
            assert table.disordered() == bool(table.why), table.name


def test_the_null_model_is_perfect_scaling_of_the_busiest_rank(
    tables: dict[str, list[Any]],
) -> None:
    """By the sources' own numbers: ring-flash-attention prints an eighth of one device's rate as
    theoretic; contiguous rings of 8 have 15/8 of the mean work on the last rank."""
    table = tables["ring-flash-attention"][0]
    null = {row.partition: row.null for row in table.rows}
    assert null == pytest.approx(
        {"contiguous": 591.5 / 8 * 8 / 15, "zigzag": 591.5 / 8, "striped": 591.5 / 8}, rel=1e-3
    )
    hybrid = tables["usp"][0]  # blocks are those of the ring between Ulysses
    assert {row.transport: row.null for row in hybrid.rows if row.partition == "contiguous"} == (
        pytest.approx({"hybrid:4": 21.002 / 1.5, "hybrid:2": 21.002 / 1.75, "ring": 21.002 / 1.875})
    )
    rates = tables["magi-attention"][0]
    assert {row.null for row in rates.rows} == {601.0}


def test_predictions_are_summed_up_beside_the_null_model(
    run: Any, tables: dict[str, list[Any]]
) -> None:
    lines = run.summary([table for found in tables.values() for table in found])
    record = FOLDER.parent / "results" / "published.json"
    assert json.loads(record.read_text())["rows"][-len(lines) :] == [
        line.rstrip() for line in lines
    ]
    rows = [run.Row(8, "zigzag", "ring", 1.0, 1.2, 1.5), run.Row(8, "zigzag", "ring", 1.0, 0.9, 1)]
    twice = [run.Table("", "", tuple(rows), "").null(), run.Table("", "", tuple(rows), "")]
    assert [row.predicted for table in twice for row in table.rows] == [1.5, 1, 1.2, 0.9]
    assert run.errors([1.2, 0.9, 1.1]) == pytest.approx((0.1, 0.2, 2 / 3))
