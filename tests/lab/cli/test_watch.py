"""A sweep that another process runs: its events, from the log of its driver and the store; and
``ringray watch``, here and on a job server that is made up."""

from __future__ import annotations

import gc
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ringray.lab import cli
from ringray.lab.cli import watch
from ringray.lab.plan.plan import Plan
from ringray.lab.store import feed
from ringray.lab.store.feed import Feed, Line
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome
from tests.support.job_server import URL, Server
from tests.support.small_spec import SMALL, fill
from tests.support.steps import Steps


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

    def start(self, index: int, attempt: int = 1) -> None:
        self.log(started=self.keys[index], attempt=attempt, at=time.time())

    def record(
        self, index: int, status: Any = "ok", why: str | None = None, logged: bool = True
    ) -> None:
        key, now = self.keys[index], time.time()
        metrics = {"median_ms": 8.0 - index} if status == "ok" else {}
        samples = {"ms": [1.0] * 5, "loss": [2.0]}
        outcome = Outcome(status, why, metrics, samples, "p", 1, now - 1, now)
        self.store.record(self.plan.digest, key, outcome)
        if logged:
            ended = {"status": status, "reason": why, "metrics": metrics}
            self.log(ended=key, outcome=ended | {"started": now - 1, "ended": now})

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
def driven(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    steps = Steps()
    monkeypatch.setattr(feed, "time", steps)
    made = Driven(home / "store.db", steps)
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
    assert rows[first]["samples"] == {"ms": [1.0] * 5}  # curves would fill the log


@pytest.mark.parametrize(("done", "told"), [(0, [3]), (1, [0, 3])])
def test_those_who_come_later_see_what_stands_and_what_ended_since(
    driven: Driven, done: int, told: list[int]
) -> None:
    """With --again, or of other code, nothing stands."""
    driven.begin(done)
    driven.start(3)
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


# The command


@pytest.mark.parametrize(("status", "code"), [("complete", 0), ("failed", 1), ("interrupted", 130)])
def test_it_follows_and_exits_as_the_sweep(
    driven: Driven, status: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    driven.begin()
    driven.start(2)
    driven.steps.todo = [
        partial(driven.log, note="rank 1 died; trying again"), partial(driven.start, 2, 2),
        partial(driven.record, 2), partial(driven.start, 3),
        partial(driven.record, 3, "failed", "rank 1 ended: SIGKILL\nmore"),
        partial(driven.end, status),
    ]  # fmt: skip
    assert cli.main(["watch", "small"]) == code
    text = capsys.readouterr().out
    digest = driven.plan.digest
    first, *_ = text.splitlines()
    assert first == f"small {digest[:8]}: 6 trials, 2 trials measured before, 2 pruned"
    assert "rank 1 died; trying again\n" in text
    for line in (
        r"^.*: attempt 2$",
        r"^\[3/6\] .*  ok  6.00 ms$",
        r"^\[4/6\] .*  failed  rank 1 ended: SIGKILL$",
        rf"^small  {digest[:12]}  latency  {status}",
    ):
        assert re.search(line, text, re.MULTILINE)
    assert "3 ok · 2 pruned · 1 failed · 2 pending" in text
    assert "answer: " in text
    assert not driven.steps.todo


def test_ctrl_c_ends_the_watcher_only(driven: Driven, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    driven.begin()
    driven.steps.todo = [interrupt]
    assert cli.main(["watch", "small"]) == 130
    assert "ringray: interrupted" in capsys.readouterr().err
    assert driven.store.find("small").status == "running"


# On a head


def told(driven: Driven) -> list[str]:
    """The lines of a whole feed, in which one trial is measured."""
    driven.begin()
    driven.start(2)
    events = driven.events(partial(driven.record, 2), partial(driven.end, "failed"))
    return [f"{json.dumps(event)}\n" for event in events]


def test_on_a_head_one_small_job_is_followed(
    driven: Driven, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Running entrypoint for job x: python\nringray: warning: the store lacks its log\n"
    text += "".join(told(driven))
    server.logs = [[text[start : start + 700] for start in range(0, len(text), 700)]]
    assert cli.main(["watch", "small", "--address", URL, "--store", "/s.db"]) == 1
    out = capsys.readouterr().out
    assert "[3/6]" in out
    assert "small  " in out
    assert server.asked == ["python -m ringray watch small --lines --store /s.db"]
    assert server.jobs == {}


def test_a_command_that_ends_before_the_sweep_is_started_again(
    driven: Driven, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = told(driven)
    server.logs = [[*lines[:12], OSError("no route")], lines[:14], lines]
    assert cli.main(["watch", "small", "--address", URL]) == 1
    assert "[3/6]" in capsys.readouterr().out
    assert len(server.asked) == 2
    assert server.jobs == {}


def test_ctrl_c_ends_the_job_on_the_head(
    home: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    server.logs, server.asked_ends = [['{"note": "a"}\n', interrupt]], "RUNNING"
    assert cli.main(["watch", "small", "--address", URL]) == 130
    gc.collect()  # asyncio reports the interrupted task now, not within another test
    assert len(server.stops) == 1
    assert server.jobs == {}


def test_a_command_on_a_head_ends_some_time_after_its_watcher_was_killed(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while nothing happens."""
    driven.begin()
    clock = [0.0]
    monkeypatch.setattr(watch, "LIFE_S", 3.0)
    monkeypatch.setattr(driven.steps, "monotonic", lambda: clock[0])

    def passes() -> None:
        clock[0] += 1.0

    driven.steps.todo = [passes] * 3
    assert cli.main(["watch", "small", "--lines"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["sweep"]["name"] == "small"
    assert [next(iter(line)) for line in lines].count("over") == 0
