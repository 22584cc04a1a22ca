"""The events of a sweep that another process runs, and what its driver writes for them."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ringray.lab.store import driver_state, feed
from ringray.lab.store.driver_state import DriverState
from ringray.lab.store.feed import Event, Feed
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome
from tests.support.small_spec import SMALL, fill
from tests.support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringray.lab.plan.plan import Plan


class Driven:
    """A store with a sweep of six trials, two of which an earlier driver has measured."""

    def __init__(self, path: Path, steps: Steps) -> None:
        self.steps = steps
        text = SMALL.replace("{enabled: false}", "{uri: 'http://me:secret@there'}")
        self.plan: Plan = fill(path, text)
        self.store, self.lease = Store(path), ExitStack()
        self.path = driver_state.path_of(path, self.plan.digest)
        self.keys = [trial.key for trial in self.plan.runnable]

    def begin(self, done: int | None = 2, **more: Any) -> None:
        """A driver begins; ``done``: so many trials stand, None: it is not that far."""
        self.lease.enter_context(self.store.lease(self.plan.digest))
        self.tell(done, **more)

    def tell(self, done: int | None = 2, **more: Any) -> None:
        known = None if done is None else self.keys[:done]
        self.state = DriverState(os.getpid(), time.time() - 5, known, **more)
        driver_state.write(self.path, self.state)

    def record(self, index: int, status: Any = "ok") -> None:
        now, samples = time.time(), {"ms": [1.0], "loss": [2.0]}
        outcome = Outcome(status, None, {"median_ms": 1.0}, samples, "p", 1, now - 1, now)
        self.store.record(self.plan.digest, self.keys[index], outcome)

    def end(self, status: Any = "complete") -> None:
        self.store.finish(self.plan.digest, status)
        self.die()

    def die(self) -> None:
        self.lease.close()
        self.lease = ExitStack()

    def done(self, begin: Event) -> list[str]:
        """Keys of a ``begin``, without those of points that can never run."""
        return [key for key in begin["begin"]["done"] if key in self.keys]

    def events(self, *todo: Any) -> list[Event]:
        """All events, while one of ``todo`` happens between two looks at the store."""
        self.steps.todo = list(todo)
        found = list(Feed(self.store, self.plan.digest).events())
        assert not self.steps.todo
        return json.loads(json.dumps(found))  # type: ignore[no-any-return]


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    steps = Steps()
    monkeypatch.setattr(feed, "time", steps)
    made = Driven(tmp_path / "store.db", steps)
    yield made
    made.die()
    made.store.close()


def names(events: list[Event]) -> list[str]:
    return [next(iter(event)) for event in events]


WHOLE = ["sweep", *["row"] * 8, "begin"]


def test_a_sweep_that_is_over_is_told_once(driven: Driven) -> None:
    driven.end("failed")
    events = driven.events()
    assert names(events) == [*WHOLE, "over"]
    assert events[0]["sweep"]["name"] == "small"
    assert events[-1] == {"over": "failed"}
    assert "secret" not in json.dumps(events)  # others may read the log of a job


def test_what_a_driver_does_is_told_as_it_comes(driven: Driven) -> None:
    first, second = driven.keys[2:4]
    driven.begin(running={first: (1, time.time() - 3)}, notes=[(1, "starting \x1b[31m")])

    def again() -> None:
        now = time.time()
        driven.tell(running={first: (2, now)}, notes=[(1, "starting"), (2, "trying again")])

    def on() -> None:
        driven.tell(running={second: (1, time.time())})
        driven.record(2)

    def end() -> None:
        driven.record(3)
        driven.end()

    events = driven.events(again, on, end)
    assert names(events) == [
        *WHOLE, "note", "started", "note", "started", "started", "row", "row", *WHOLE, "over",
    ]  # fmt: skip
    begin, said, started, _, more, other, row = events[9:16]
    assert driven.done(begin) == driven.keys[:2]
    assert 5 <= begin["begin"]["ago"] < 60
    assert said == {"note": "starting \ufffd[31m"}
    assert (started["started"], started["attempt"]) == (first, 1)
    assert started["ago"] >= 3
    assert (more["started"], more["attempt"]) == (first, 2)
    assert other["started"] == second
    assert (row["row"]["key"], row["row"]["status"]) == (first, "ok")
    assert row["row"]["samples"] == {"ms": [1.0]}  # curves would fill the log


def test_measurements_that_do_not_stand_are_waited_for(driven: Driven) -> None:
    """With --again, or of another code."""
    driven.begin(done=0)
    events = driven.events(lambda: driven.record(0), driven.end)
    assert driven.done(events[9]) == []


def test_trials_of_this_run_are_done_for_those_who_come_later(driven: Driven) -> None:
    driven.begin(done=1)
    driven.record(3)
    events = driven.events(driven.end)
    assert driven.done(events[9]) == [driven.keys[0], driven.keys[3]]


def test_a_killed_driver_is_told_and_the_next_one_followed(driven: Driven) -> None:
    driven.begin()
    driven.record(2)
    stays = driven.path.read_text()

    def killed() -> None:
        driven.die()
        driven.path.write_text(stays)  # nobody removes it

    events = driven.events(killed, int, int, int, driven.begin, driven.end)
    note = {"note": "its driver was killed; `ringray resume small` continues"}
    assert names(events) == [*WHOLE, "note", *WHOLE, *WHOLE, "over"]
    assert note in events


def test_a_sweep_whose_driver_is_dead_is_shown_and_waited_for(driven: Driven) -> None:
    events = driven.events(int, int, driven.end)
    assert names(events) == [*WHOLE, "note", *WHOLE, "over"]
    assert len(driven.done(events[9])) == 2


def test_a_sweep_that_is_being_resumed_is_not_over(driven: Driven) -> None:
    driven.store.finish(driven.plan.digest, "interrupted")
    driven.begin(done=None)

    def begun() -> None:
        with driven.store._write(driven.plan.digest) as db:
            db.execute("UPDATE sweeps SET status = 'running'")
        driven.tell()

    assert names(driven.events(int, begun, driven.end)) == [*WHOLE, *WHOLE, "over"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        "null",
        '{"pid": 1}',
        '{"pid": 1, "running": 3}',
    ],
)
def test_a_damaged_or_foreign_state_is_as_good_as_none(driven: Driven, content: str) -> None:
    driven.begin()
    driven.path.write_text(content)
    assert driver_state.read(driven.path, os.getpid()) is None
    events = driven.events(lambda: driven.record(2), driven.end)
    assert names(events) == [*WHOLE, "row", *WHOLE, "over"]
    assert len(driven.done(events[9])) == 2


def test_the_state_is_read_as_it_was_written_and_by_pid(tmp_path: Path) -> None:
    path = driver_state.path_of(tmp_path / "s.db", "ab12" * 16)
    assert path == tmp_path / ".s.db.ab12ab12ab12.driver.json"
    state = DriverState(7, 1.5, ["a"], {"b": (2, 3.5)}, [(1, "x")])
    driver_state.write(path, state)
    assert path.stat().st_mode & 0o777 == 0o600
    assert driver_state.read(path, 7) == state
    assert driver_state.read(path, 8) is None
    driver_state.write(tmp_path / "nowhere" / "x", state)  # a full disk is no reason to stop
    path.unlink()
    os.mkfifo(path)
    assert driver_state.read(path, 7) is None
