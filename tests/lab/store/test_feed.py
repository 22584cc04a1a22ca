"""The events of a sweep that another process runs, from the log of its driver and the store."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from ringray.lab.store import feed
from ringray.lab.store.feed import Feed, Line
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome
from tests.support.small_spec import SMALL, fill
from tests.support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ringray.lab.plan.plan import Plan


class Driven:
    """A store with a sweep of six trials, two of which an earlier driver has measured."""

    def __init__(self, path: Path, steps: Steps) -> None:
        self.steps = steps
        text = SMALL.replace("{enabled: false}", "{uri: 'http://me:secret@there'}")
        self.plan: Plan = fill(path, text)
        self.store, self.lease = Store(path), ExitStack()
        self.path = feed.path_of(path, self.plan.digest)
        self.keys = [trial.key for trial in self.plan.runnable]

    def take_lease(self) -> None:
        self.lease.enter_context(self.store.lease(self.plan.digest))
        self.path.write_text(json.dumps({"driver": os.getpid()}) + "\n")

    def begin(self, done: int = 2) -> None:
        """A driver begins; so many trials stand."""
        self.take_lease()
        self.log(begin=time.time() - 5, done=self.keys[:done])

    def log(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def record(self, index: int, logged: bool = True) -> None:
        key, now = self.keys[index], time.time()
        samples = {"ms": [1.0], "loss": [2.0]}
        outcome = Outcome("ok", None, {"median_ms": 1.0}, samples, "p", 1, now - 1, now)
        self.store.record(self.plan.digest, key, outcome)
        if logged:
            self.log(ended=key, outcome={"status": "ok", "ended": now})

    def end(self, status: Any = "complete") -> None:
        self.store.finish(self.plan.digest, status)
        self.die()
        self.path.unlink(missing_ok=True)

    def die(self) -> None:
        self.lease.close()
        self.lease = ExitStack()

    def done(self, begin: Line) -> list[str]:
        """Keys of a ``begin``, without those of points that can never run."""
        return [key for key in begin["begin"]["done"] if key in self.keys]

    def events(self, *todo: Any) -> list[Line]:
        """All events, while one of ``todo`` happens between two looks."""
        self.steps.todo = list(todo)
        events = list(Feed(self.store, self.plan.digest).events())
        assert not self.steps.todo
        return json.loads(json.dumps(events))  # type: ignore[no-any-return]


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    steps = Steps()
    monkeypatch.setattr(feed, "time", steps)
    made = Driven(tmp_path / "store.db", steps)
    yield made
    made.die()
    made.store.close()


def names(events: list[Line]) -> list[str]:
    return [next(iter(event)) for event in events]


ROWS = ["sweep", *["row"] * 8]
WHOLE = [*ROWS, "begin"]


def test_a_sweep_that_is_over_is_told_once(driven: Driven) -> None:
    driven.end("failed")
    events = driven.events()
    assert names(events) == [*ROWS, "over"]
    assert events[0]["sweep"]["name"] == "small"
    assert events[-1] == {"over": "failed"}
    assert "secret" not in json.dumps(events)  # others may read the log of a job


def test_what_a_driver_does_is_told_as_it_comes(driven: Driven) -> None:
    first = driven.keys[2]
    driven.begin()
    driven.log(note="starting \x1b[31m")
    driven.log(started=first, attempt=1, at=time.time() - 3)

    def again() -> None:
        with driven.path.open("a") as file:
            file.write('{"note": "cut sho\n{"note": "trying again"}\n{"curve": 0}\n{"started": ')

    def end() -> None:
        with driven.path.open("a") as file:
            file.write(f'"{first}", "attempt": 2, "at": {time.time()}}}\n')
        driven.record(2)
        driven.end()

    events = driven.events(again, end)
    assert names(events) == [*WHOLE, "note", "started", "note", "started", "ended", *ROWS, "over"]
    begin, note, started, _, second, ended = events[9:15]
    assert driven.done(begin) == driven.keys[:2]
    assert 5 <= begin["begin"]["ago"] < 60
    assert note == {"note": "starting \ufffd[31m"}
    assert (started["started"], started["attempt"]) == (first, 1)
    assert started["ago"] >= 3
    assert (second["started"], second["attempt"]) == (first, 2)
    assert ended["ended"] == first
    rows = {event["row"]["key"]: event["row"] for event in events[16:24]}
    assert rows[first]["samples"] == {"ms": [1.0]}  # curves would fill the log


@pytest.mark.parametrize(("done", "told"), [(0, [3]), (1, [0, 3])])
def test_those_who_come_later_see_what_stands_and_what_ended_since(
    driven: Driven, done: int, told: list[int]
) -> None:
    """With --again, or of other code, nothing stands."""
    driven.begin(done)
    driven.log(started=driven.keys[3], attempt=1, at=time.time())
    driven.record(3)
    events = driven.events(driven.end)
    assert names(events) == [*WHOLE, *ROWS, "over"]
    assert driven.done(events[9]) == [driven.keys[index] for index in told]


def test_a_killed_driver_is_told_and_the_next_one_followed(driven: Driven) -> None:
    driven.begin()
    driven.record(2, logged=False)
    events = driven.events(driven.die, int, int, int, driven.begin, driven.end)
    note = {"note": "its driver was killed; `ringray resume small` continues"}
    assert names(events) == [*WHOLE, "note", *WHOLE, *ROWS, "over"]
    assert note in events


def test_a_sweep_whose_driver_is_dead_is_shown_and_waited_for(driven: Driven) -> None:
    driven.path.write_text('{"driver": 1}\n{"begin": 1.0, "done": []}\n')
    events = driven.events(int, int, driven.end)
    assert names(events) == [*WHOLE, "note", *ROWS, "over"]
    assert len(driven.done(events[9])) == 2


def test_a_sweep_that_is_being_resumed_is_not_over(driven: Driven) -> None:
    driven.store.finish(driven.plan.digest, "interrupted")
    driven.take_lease()

    def begun() -> None:
        driven.log(begin=time.time(), done=driven.keys[:2])
        driven.store.finish(driven.plan.digest, "complete")

    assert names(driven.events(int, begun)) == [*WHOLE, *ROWS, "over"]


@pytest.mark.parametrize("content", ["", "{", '{"driver": 1}\n{"begin": 1.0}'])
def test_a_log_that_cannot_be_read_is_as_good_as_none(driven: Driven, content: str) -> None:
    driven.begin()
    driven.path.write_text(content)
    events = driven.events(lambda: driven.record(2, logged=False), driven.end)
    assert names(events) == [*ROWS, "over"]
