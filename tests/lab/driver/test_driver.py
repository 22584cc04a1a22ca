"""Sweeps from the command line to the store and MLflow, on real Ray, run to the end or cut off."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.support import place as drive
from tests.support.place import Done, Place, tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEYS = [
    "point", "sweep", "status", "reason", "config", "metrics", "environment", "format", "time",
    "name", "samples", "predicted", "over_predicted",
]  # fmt: skip
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
    assert swept.first.errors == []
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
    assert [list(line) for line in swept.lines] == [KEYS] * 6
    assert sorted(line["status"] for line in swept.lines) == ["ok"] * 3 + ["pruned"] * 3
    assert len({line["point"] for line in swept.lines}) == 6
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
            assert row.started is not None
            assert row.ended is not None
            assert row.started < row.ended
    assert not by_point


def test_mlflow_shows_it_once(swept: Swept, place: Place) -> None:
    (parent,), children = place.mlflow("sizes")
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["ringray.sweep"] == swept.lines[0]["sweep"]
    rows = {row.key: row for row in place.trials("sizes")}
    assert set(children) == set(rows)
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


# One sweep that is broken off twice: by Ctrl-C, then by kill -9

REPLICAS = 40


class BrokenOff(NamedTuple):
    interrupted: Done
    after_interrupt: tuple[str, dict[str, int]]
    refused: Done
    driver: int
    after_kill: dict[str, Any]
    resumed: Done


@pytest.fixture(scope="module")
def broken_off(place: Place) -> BrokenOff:
    # Trials long enough that a signal which follows a few of them meets the sweep in its middle.
    spec = place.spec(tiny("broken", replicas=REPLICAS, repeats=25))
    json = place.home / "broken.jsonl"

    def running(*arguments: object, trials: int) -> Any:
        process = place.start(*arguments, "--json", json)
        drive.wait_until(
            f"{trials} trials", lambda: len(place.lines(json)) >= trials or process.poll()
        )
        return process

    first = running("run", spec, trials=5)
    first.send_signal(signal.SIGINT)
    interrupted = place.end(first)
    (sweep,) = [row for row in place.sweeps() if row.name == "broken"]
    second = running("resume", "broken", trials=len(place.lines(json)) + 5)
    refused = place.run("run", spec)
    second.kill()
    place.end(second)
    measured = {row.key: row for row in place.trials("broken") if row.status is not None}
    return BrokenOff(
        interrupted, (sweep.status, sweep.counts), refused, second.pid, measured,
        place.run("resume", "broken", "--json", json),
    )  # fmt: skip


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_that_can_be_resumed(broken_off: BrokenOff) -> None:
    done = broken_off.interrupted
    assert done.code == 130, done.err
    assert "Traceback" not in done.out + done.err
    assert "continue with: ringray resume broken" in done.out
    status, counts = broken_off.after_interrupt
    assert status == "interrupted"
    assert set(counts) == {"ok"}
    assert 5 <= counts["ok"] < REPLICAS


def test_a_second_driver_is_refused(broken_off: BrokenOff) -> None:
    assert broken_off.refused.code == 2
    assert f"process {broken_off.driver}" in broken_off.refused.err
    assert "ringray resume broken" in broken_off.refused.err
    assert broken_off.refused.out == ""


def test_nothing_measured_is_measured_again(broken_off: BrokenOff, place: Place) -> None:
    assert broken_off.resumed.code == 0, broken_off.resumed.err
    before = broken_off.after_kill
    assert 10 <= len(before) < REPLICAS
    assert f"{len(before)} trials measured before" in broken_off.resumed.out
    rows = place.trials("broken")
    assert [row.status for row in rows] == ["ok"] * REPLICAS
    assert [row.attempts for row in rows] == [1] * REPLICAS
    for row in rows:
        if row.key in before:
            assert row == before[row.key]
        else:
            assert row.started is not None
            assert row.started > max(old.ended for old in before.values())


def test_mlflow_shows_one_complete_sweep(broken_off: BrokenOff, place: Place) -> None:
    (parent,), children = place.mlflow("broken")
    assert parent.info.status == "FINISHED"
    assert len(children) == REPLICAS
    assert {child.info.status for child in children.values()} == {"FINISHED"}


def test_no_process_is_left(broken_off: BrokenOff, place: Place) -> None:
    # Of a killed driver, Ray's agents look for the dead GCS for a minute, which nobody can set.
    place.check_nothing_is_left(but=("ray::DashboardAgent", "ray::RuntimeEnvAgent"))


# Places where a sweep cannot run: exit 2, and nothing is recorded


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Place]:
    yield from drive.place(tmp_path)


@pytest.mark.exhaustive
def test_rings_that_no_machine_holds(fresh: Place) -> None:
    spec = fresh.spec(tiny("huge", size="[500, 600]"))
    done = fresh.run("run", spec)
    assert done.code == 2
    assert f"{spec}:4: " in done.err
    assert "a ring of 500 needs 500 CPUs, this machine can hold" in done.err
    assert "Traceback" not in done.err
    assert fresh.sweeps() == []
    assert fresh.mlflow("huge") == ([], {})
    # Where some fit, those are run.
    spec = fresh.spec(tiny("some", size="[1, 500]"))
    json = fresh.home / "some.jsonl"
    done = fresh.run("run", spec, "--json", json)
    assert done.code == 0, done.err
    assert [row.counts for row in fresh.sweeps()] == [{"ok": 1, "pruned": 1}]
    assert sorted(line["status"] for line in fresh.lines(json)) == ["ok", "pruned"]
    done = fresh.run("run", spec, "--json", json)
    assert done.code == 0, done.err
    assert [row.counts for row in fresh.sweeps()] == [{"ok": 1, "pruned": 1}]
    assert len(fresh.lines(json)) == 2
    assert fresh.trials("some")[0].attempts == 1
    (parent,), children = fresh.mlflow("some")
    assert parent.info.status == "FINISHED"
    assert len(children) == 2
    fresh.check_nothing_is_left()


def test_a_tracking_server_that_does_not_answer(fresh: Place) -> None:
    spec = fresh.spec(tiny("untracked") + 'tracking: {uri: "http://127.0.0.1:1"}\n')
    done = fresh.run("run", spec)
    assert done.code == 2
    assert "http://127.0.0.1:1" in done.err
    assert "tracking.uri" in done.err
    assert fresh.sweeps() == []
    assert not (fresh.ray / "ray").exists()


def test_a_store_that_is_a_directory(fresh: Place) -> None:
    (fresh.home / "taken").mkdir()
    done = fresh.run("run", fresh.spec(tiny("nowhere")), "--store", fresh.home / "taken")
    assert done.code == 2
    assert f"{fresh.home / 'taken'} is a directory" in done.err
    assert not (fresh.ray / "ray").exists()


def test_a_json_file_that_cannot_be_written(fresh: Place) -> None:
    done = fresh.run("run", fresh.spec(tiny("unwritten")), "--json", fresh.home / "no" / "a.jsonl")
    assert done.code == 2
    assert "--json" in done.err
    assert fresh.sweeps() == []
    assert not (fresh.ray / "ray").exists()


def test_a_cluster_that_is_not_there(fresh: Place) -> None:
    done = fresh.run("run", fresh.spec(tiny("alone")), "--address", "127.0.0.1:1")
    assert done.code == 2
    assert "no Ray answers at 127.0.0.1:1" in done.err
    assert fresh.sweeps() == []
