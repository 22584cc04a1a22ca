"""Sweeps from the command line to the store and MLflow, on real Ray, run to the end or cut off."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.support import place as drive
from tests.support.place import Done, Place, tiny

TIMED = {
    "median_ms",
    "p20_ms",
    "p80_ms",
    "tflops",
    "tflops_per_rank",
    "tokens_per_s",
    "sent_bytes",
    "peak_memory_bytes",
    "wait_ms",
    "baseline_ms",
    "ratio",
    "cpu_percent",
    "host_cpu_percent",
    "rss_bytes",
    "niceness",
}
COMPARED = {"prediction_ratio", "prediction_memory_ratio"}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield from drive.place(tmp_path_factory.mktemp("home"))


# One sweep over three ring sizes, of which one point is impossible, run twice


class Swept(NamedTuple):
    first: Done
    lines: list[dict[str, Any]]
    again: Done
    lines_again: list[dict[str, Any]]


@pytest.fixture(scope="module")
def swept(place: Place) -> Swept:
    text = tiny("sizes", size="[1, 2, 3]", repeats=3).replace(
        "baseline: null", "baseline: {name: sdpa, threads: 1}"
    )
    spec = place.spec(text.replace("heads: 2", "heads: 2, kv_heads: [2, 4]"))
    json = place.home / "sizes.jsonl"
    arguments = ("run", spec, "--store", place.home / "store.db", "--json", json)
    first = place.run(*arguments)
    lines = place.lines(json)
    return Swept(first, lines, place.run(*arguments), place.lines(json))


def test_a_sweep_ends_well(swept: Swept) -> None:
    assert swept.first.code == 0, swept.first.err
    others = [line for line in swept.first.err.splitlines() if ": waiting for " not in line]
    assert others == []  # a busy machine takes its time
    out = swept.first.out
    for size in (1, 2, 3):
        assert f"ring{size}  ok" in out
    assert (
        out.index("3 trials, 3 pruned")
        < out.index("[1/3]")
        < out.index("[3/3]")
        < out.index("mlflow: ")
    )
    assert "problem.kv_heads: 2 heads is not a multiple of 4 K/V heads" in out


def test_each_line_of_json_is_a_record(swept: Swept) -> None:
    assert sorted(line["status"] for line in swept.lines) == ["ok"] * 3 + ["pruned"] * 3
    assert len({line["point"] for line in swept.lines}) == len(swept.lines) == 6
    assert len({line["sweep"] for line in swept.lines}) == 1
    for line in swept.lines:
        if line["status"] == "pruned":
            assert line["metrics"] == {}
            assert "problem.kv_heads" in line["reason"]
            continue
        assert line["reason"] is None
        assert set(line["metrics"]) == TIMED
        assert set(line["over_predicted"]) == COMPARED
        assert line["predicted"]["time_ms"] > 0
        assert all(math.isfinite(value) for value in line["metrics"].values())
        times = [line["metrics"][name] for name in ("p20_ms", "median_ms", "p80_ms")]
        assert times == sorted(times)
        assert line["metrics"]["sent_bytes"] == line["predicted"]["sent_bytes"]
        assert (line["metrics"]["sent_bytes"] > 0) == (line["config"]["ring_size"] > 1)
        assert line["environment"]["versions"]["torch"]


def test_the_store_holds_the_same(swept: Swept, place: Place) -> None:
    (sweep,) = [row for row in place.sweeps() if row.name == "sizes"]
    assert (sweep.status, sweep.counts) == ("complete", {"ok": 3, "pruned": 3})
    by_point = {line["point"]: line for line in swept.lines}
    for row in place.trials("sizes"):
        line = by_point.pop(row.point or "")
        assert (line["status"], line["config"], line["metrics"]) == (
            row.status, row.config, row.metrics,
        )  # fmt: skip
        if row.status == "ok":
            assert row.attempts == 1
            assert [len(row.samples[name]) for name in ("ms", "baseline_ms", "ratio")] == [3] * 3
            assert row.started < row.ended
    assert not by_point


def test_mlflow_shows_it_once(swept: Swept, place: Place) -> None:
    (parent,), children = place.mlflow("sizes")
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["ringray.sweep"] == swept.lines[0]["sweep"]
    rows = {row.key: row for row in place.trials("sizes")}
    assert set(children) == {key for key, row in rows.items() if row.status != "pruned"}
    for key, child in children.items():
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert child.data.tags["ringray.status"] == rows[key].status
        assert child.data.params["ring_size"] == str(rows[key].config["ring_size"])
        shown = {name.removeprefix("system/"): v for name, v in child.data.metrics.items()}
        assert shown == pytest.approx(rows[key].numbers)
        if rows[key].status == "ok":
            assert set(shown) == TIMED | COMPARED, "a chart needs every metric of every trial"
            assert {"system/cpu_percent", "system/rss_bytes"} <= set(child.data.metrics)
            assert {"hardware.cpu", "versions.torch", "code"} <= set(child.data.tags)
            assert ("git.commit" in child.data.tags) == (drive.REPOSITORY / ".git").exists()


def test_a_second_run_measures_nothing(swept: Swept, place: Place) -> None:
    assert swept.again.code == 0, swept.again.err
    assert "3 trials measured before" in swept.again.out
    assert "starting" not in swept.again.out
    assert swept.lines_again == swept.lines
    assert [row.attempts for row in place.trials("sizes") if row.status == "ok"] == [1] * 3
    # Ray was not even started: its folder holds the session of the first run alone.
    assert len(list((place.ray / "ray").glob("session_2*"))) == 1
    assert not place.processes()
