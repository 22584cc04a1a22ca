"""The metrics of a sweep on their way to Ray, which is a stand-in; and the lines of --json."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from ray.util import metrics as of_ray

from ringray.base.errors import PlaceError
from ringray.lab.driver import exporter
from ringray.lab.driver.events import (
    StepEnded,
    SweepEnded,
    SweepStarted,
    TrialEnded,
    TrialStarted,
)
from ringray.lab.driver.exporter import Exporter
from ringray.lab.driver.json_lines import JsonLines
from ringray.lab.plan.plan import Plan, build
from ringray.lab.specs.model import parse
from ringray.lab.store.store import Store
from ringray.lab.trial.exported import EXPORTED
from ringray.lab.trial.outcome import STATUSES, Outcome, SweepInfo, TrialRow
from tests.support.place import PATIENCE, tiny
from tests.support.store_rows import DIGEST, OTHER, ok, sweep, trial

UNITS = ("_seconds", "_bytes", "_ratio", "_per_second")


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> Queue[tuple[str, float, dict[str, str]]]:
    """The calls of Ray's gauges: name, value, tags."""
    calls: Queue[tuple[str, float, dict[str, str]]] = Queue()

    def make(name: str, help: str, labels: tuple[str, ...]) -> Any:
        def take(value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(labels)
            calls.put((name, value, dict(tags)))

        return SimpleNamespace(set=take)

    monkeypatch.setattr(of_ray, "Gauge", make)
    monkeypatch.setattr(exporter, "PUSH_S", 0.01)
    return calls


def started(done: Any = None) -> tuple[Exporter, Plan]:
    made, plan = Exporter(), build(parse(tiny("a", replicas=4)))
    made.take(SweepStarted(plan, SimpleNamespace(), done or {}))  # type: ignore[arg-type]
    return made, plan


def seen(under_test: Exporter) -> dict[tuple[str, str], float]:
    return {(metric.name, label): value for metric, label, value in under_test.samples()}


def test_trials_count_once_and_numbers_are_those_of_one_trial() -> None:
    under_test, plan = started()
    first, second, third, _ = plan.trials
    whole = {"median_ms": 20.0, "tflops": 3.0, "sent_bytes": 7.0, "ratio": 0.9}
    for point, outcome in [
        (first, Outcome("pruned", "why")),
        (second, Outcome("failed")),
        (second, Outcome("ok", metrics=whole)),  # visited again
        (third, Outcome("oom", metrics={"median_ms": 1.0})),
    ]:
        under_test.take(TrialEnded(point, outcome))
    numbers = seen(under_test)
    counts = {status: numbers["ringray_trials", status] for status in STATUSES}
    assert counts == {"ok": 1, "oom": 1, "pruned": 1, "timeout": 0, "failed": 0}
    assert numbers["ringray_pending_trials", ""] == 1
    assert numbers["ringray_pass_seconds", ""] == pytest.approx(0.02)
    assert numbers["ringray_flops_per_second", ""] == pytest.approx(3e12)
    under_test.take(StepEnded(third, 2, {}, {"median_ms": math.nan, "tflops": 1.0}))
    names = {name for name, _ in seen(under_test)} & {x.name for x in EXPORTED if x.metric}
    assert names == {"ringray_flops_per_second"}
    earlier, plan = started({plan.trials[0].key: SimpleNamespace(status="oom")})
    assert seen(earlier)["ringray_trials", "oom"] == 1


def test_gauges_are_set_again_and_a_last_time_at_the_end(pushes: Queue[Any]) -> None:
    under_test, plan = started()
    under_test.take(TrialStarted(plan.trials[0], 1))
    pending = 0
    while pending < 3:
        name, value, tags = pushes.get(timeout=PATIENCE)
        assert (tags["sweep"], tags["kind"]) == ("a", "latency")
        pending += (name, value) == ("ringray_pending_trials", 4)
    under_test.take(TrialEnded(plan.trials[0], Outcome("ok")))
    under_test.take(SweepEnded(SimpleNamespace()))  # type: ignore[arg-type]
    last = [value for name, value, _ in pushes.queue if name == "ringray_pending_trials"][-1]
    assert last == 3
    assert not any(thread.name == "metrics" for thread in threading.enumerate())


def test_a_ray_that_refuses_or_hangs_ends_nothing(
    pushes: Queue[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, never = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        begun.set()
        never.wait()
        raise ValueError("no such thing")

    monkeypatch.setattr(of_ray, "Gauge", lambda *_: SimpleNamespace(set=hang))
    monkeypatch.setattr(exporter, "END_S", 0.01)
    under_test, plan = started()
    under_test.take(TrialStarted(plan.trials[0], 1))
    begun.wait()
    under_test.take(TrialEnded(plan.trials[0], Outcome("ok", metrics={"tflops": 1.0})))
    under_test.close()
    never.set()
    under_test._thread.join()
    with pytest.raises(RuntimeError, match="no more metrics for Prometheus: no such thing"):
        under_test.take(TrialStarted(plan.trials[1], 1))


# --json has a line for every trial that the store holds, and none twice

ENDED = TrialEnded(
    build(parse("version: 1\nname: x\nkind: latency\nproblem: {seq_len: 80}\n")).trials[0],
    Outcome("ok"),
)


@pytest.fixture
def rows(tmp_path: Path) -> list[TrialRow]:
    with Store(tmp_path / "store.db") as store:
        store.begin(sweep(), [*(trial(index) for index in range(4)), trial(4, "too large")])
        for index in (2, 0, 1):
            store.record(DIGEST, trial(index).key, ok(index))
        return [recording.trial for recording in store.changed_since(DIGEST, 0)[0]]


def _read(path: Path) -> list[int]:
    return [json.loads(line)["config"]["seq_len"] - 64 for line in path.read_text().splitlines()]


def _start(path: Path, rows: list[TrialRow], info: SweepInfo | None = None) -> JsonLines:
    lines, unused = JsonLines(str(path)), None
    lines.take(SweepStarted(unused, info or sweep(), {}, rows))  # type: ignore[arg-type]
    return lines


def test_lines_that_a_killed_driver_owes_are_written_once(
    tmp_path: Path, rows: list[TrialRow]
) -> None:
    path = tmp_path / "a.jsonl"
    _start(path, rows[:2]).close()
    assert _read(path) == [4, 2]
    with path.open("a") as file:  # as it died in the middle of a line
        file.write('{"point": "abc", "sw')
    for _ in range(2):
        _start(path, rows).close()
        assert _read(path) == [4, 2, 0, 1]
    # Measured again is another line; another sweep's lines are its own.
    again = [replace(rows[1], metrics={"median_ms": 7.0}), *rows]
    _start(path, again).close()
    assert _read(path) == [4, 2, 0, 1, 2]
    _start(path, rows[:1], sweep(OTHER, "other")).close()
    assert _read(path) == [4, 2, 0, 1, 2, 4]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(_start(Path("/dev/full"), [])) as lines:
        says = r"/dev/full: no space left .*ringray resume quick --json"
        with pytest.raises(PlaceError, match=says):
            lines.take(ENDED)
    path, write = tmp_path / "a.jsonl", os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:-10])

    with closing(_start(path, [])) as lines:
        lines.take(ENDED)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(PlaceError, match="no space left"):
                lines.take(ENDED)
        assert _read(path) == [16]
        lines.take(ENDED)
    assert _read(path) == [16, 16]
