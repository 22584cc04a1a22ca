"""Sweeps on stand-in rings: what stands, what is measured again and why; and their listeners."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.driver.event_log import EventLog
from ringray.lab.driver.events import (
    Note,
    StepEnded,
    StopSweep,
    SweepEnded,
    SweepStarted,
    TrialEnded,
    TrialStarted,
)
from ringray.lab.store import feed
from ringray.lab.store.store import Store
from tests.support.sweep_world import Heard, Rings, World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_other_code_is_measured_and_the_older_measurement_stands_again(world: World) -> None:
    summary, notes = world.run()
    assert (summary.measured, notes, world.medians()) == (3, [], [1.0, 2.0, 3.0])
    world.checkout("b")
    summary, notes = world.run()
    assert (summary.measured, world.medians()) == (3, [4.0, 5.0, 6.0])
    assert notes == [
        "to be measured again: 3 trials, measured with other code in ranks at commit aaaaaaa"
    ]
    for code, medians in (("a", [1.0, 2.0, 3.0]), ("b", [4.0, 5.0, 6.0])):
        world.checkout(code)
        for _ in range(2):
            summary, notes = world.run()
            assert (summary.measured, world.medians()) == (0, medians)
            assert notes == [
                f"taken from before: 3 trials of commit {code * 7}, the same code in ranks"
            ]
    assert world.earlier() == [1.0, 2.0, 3.0]
    world.here["git"] = {"commit": "c" * 40, "dirty": True}  # which changes nothing in ranks
    assert world.run()[0].measured == 0


@pytest.mark.parametrize(
    ("part", "change", "why"),
    [
        ("hardware", {"cores": 99}, "measured with other hardware (cores)"),
        ("versions", {"torch": "99.0"}, "measured with other versions (torch)"),
    ],
)
def test_another_machine_is_another_measurement(
    world: World, part: str, change: dict[str, Any], why: str
) -> None:
    world.run()
    world.here[part] |= change
    summary, notes = world.run()
    assert (summary.measured, notes) == (3, [f"to be measured again: 3 trials, {why}"])
    assert world.earlier() == [1.0, 2.0, 3.0]


def test_again_measures_everything_once_more_and_loses_nothing_if_interrupted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()
    monkeypatch.setattr(Rings, "most", 4)
    summary, notes = world.run(again=True)
    assert summary.interrupted
    assert notes == ["to be measured again: 3 trials, --again"]
    assert (world.medians(), world.earlier()) == ([4.0, 2.0, 3.0], [1.0])
    monkeypatch.setattr(Rings, "most", 10**9)
    assert world.run()[0].measured == 0, "every trial has a measurement that stands"
    assert world.run(again=True)[0].measured == 3
    assert (world.medians(), world.earlier()) == ([5.0, 6.0, 7.0], [1.0, 2.0, 3.0, 4.0])
    assert world.run()[0].measured == 0
    assert world.medians() == [5.0, 6.0, 7.0], "the newest of one identity is current"


# Listeners


def status(world: World) -> str:
    with Store(world.path) as store:
        return store.find("s").status


def test_events_come_in_order_and_after_the_store(world: World) -> None:
    heard = Heard()
    recorded = []

    class Reader(Heard):
        def take(self, event: object) -> None:
            if isinstance(event, TrialEnded):
                with Store(world.path, readonly=True) as store:
                    rows = {row.key: row.status for row in store.trials(world.plan.digest)}
                recorded.append(rows[event.trial.key])

    summary, _ = world.run(heard, Reader())
    trials = ["TrialStarted", "TrialEnded"] * 3
    assert heard.names == ["Note", "SweepStarted", *trials, "SweepEnded"]
    assert recorded == ["ok"] * 3
    assert heard.events[-1] == SweepEnded(summary)
    assert heard.closed == 1
    assert (summary.exit_code, status(world)) == (0, "complete")


def test_one_that_fails_is_noted_once_and_ends_nothing(world: World) -> None:
    summary, notes = world.run(Heard(TrialEnded, ValueError("no such metric")))
    assert notes == ["Heard failed: no such metric"]
    assert (summary.measured, summary.exit_code) == (3, 0)


@pytest.mark.parametrize(("at", "measured"), [(TrialStarted, 0), (TrialEnded, 1)])
def test_one_may_stop_the_sweep_which_can_be_continued(
    world: World, at: type, measured: int
) -> None:
    other = Heard()
    summary, _ = world.run(Heard(at, StopSweep("enough")), other)
    assert (summary.measured, summary.stopped, summary.exit_code) == (measured, "enough", 4)
    assert other.names[-2:] == [at.__name__, "SweepEnded"]
    assert status(world) == "interrupted"
    assert world.run()[0].measured == 3 - measured


@pytest.mark.parametrize(("at", "status_then"), [(SweepStarted, ""), (TrialEnded, "interrupted")])
def test_one_may_end_the_sweep_with_an_error(world: World, at: type, status_then: str) -> None:
    failing = Heard(at, PlaceError("the disk is full"))
    with pytest.raises(PlaceError, match="the disk is full"):
        world.run(failing)
    assert failing.closed == 1
    with Store(world.path) as store:
        assert [row.status for row in store.sweeps()] == ([status_then] if status_then else [])


# The event log


def test_the_log_has_the_events_of_this_driver_and_ends_with_it(
    world: World, tmp_path: Path
) -> None:
    path = feed.path_of(world.path, "ab12" * 16)
    assert path == tmp_path / ".store.db.ab12ab12ab12.events.jsonl"
    path.write_text('{"driver": 1}\n{"note": "of a killed one"}\n')
    heard = Heard()
    world.run(heard)
    log, reader = EventLog(world.path, "ab12" * 16), feed.LogReader(path, os.getpid())
    (trial, *_) = world.plan.trials
    for event in (*heard.events, StepEnded(trial, 3, {"loss": 1.5}, {})):
        log.take(event)
    assert path.stat().st_mode & 0o777 == 0o600
    assert reader.curve_points() == [(0, "loss", 3, 1.5)]
    assert reader.curve_points() == []
    lines = list(feed.LogReader(path, os.getpid()).lines())
    kinds = [next(iter(line)) for line in lines]
    assert kinds == ["driver", "note", "begin", *["started", "ended"] * 3, "curve"]
    assert lines[4]["outcome"]["metrics"] == {"median_ms": 1.0}
    assert list(feed.LogReader(path, 1).lines()) == [], "it is another driver's"
    log.close()
    assert not path.exists()
    log.close()
    log.take(Note("late"))
