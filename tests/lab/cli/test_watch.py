"""`ringray watch`: a sweep that another process runs, here and on a job server that is made up."""

from __future__ import annotations

import gc
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ringray.base.locks import Owner
from ringray.lab import cli
from ringray.lab.cli import watch
from ringray.lab.store import feed
from ringray.lab.store.feed import Feed
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome
from tests.support.job_server import URL, Server
from tests.support.small_spec import fill
from tests.support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ringray.lab.plan.plan import Plan

PID = 4711


class Sweep:
    """A sweep of six trials, two of which are measured, in the store of the home; the log of its
    driver is made up."""

    def __init__(self, home: Path, steps: Steps) -> None:
        home.mkdir(exist_ok=True)
        self.steps, self.path = steps, home / "store.db"
        self.plan: Plan = fill(self.path)
        self.store = Store(self.path)
        self.keys = [trial.key for trial in self.plan.runnable]
        self.log(driver=PID)()
        self.log(begin=time.time() - 60, done=self.keys[:2])()

    def log(self, **line: Any) -> Callable[[], None]:
        """A step: the driver writes a line."""

        def step() -> None:
            with feed.path_of(self.path, self.plan.digest).open("a") as file:
                file.write(json.dumps(line) + "\n")

        return step

    def start(self, index: int, attempt: int = 1) -> Callable[[], None]:
        return lambda: self.log(started=self.keys[index], attempt=attempt, at=time.time())()

    def record(self, index: int, status: Any = "ok", why: str | None = None) -> Callable[[], None]:
        metrics = {"median_ms": 8.0 - index} if status == "ok" else {}

        def step() -> None:
            now, key = time.time(), self.keys[index]
            outcome = {"status": status, "reason": why, "metrics": metrics}
            outcome |= {"samples": {"ms": [1.0] * 5}, "started": now - 1, "ended": now}
            self.store.record(self.plan.digest, key, Outcome(**outcome))
            self.log(ended=key, outcome=outcome)()

        return step

    def end(self, status: Any = "complete") -> Callable[[], None]:
        return lambda: self.store.finish(self.plan.digest, status)


@pytest.fixture
def sweep(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweep]:
    steps = Steps()
    monkeypatch.setattr(feed, "time", steps)
    monkeypatch.setattr(Store, "owner", lambda *_: Owner(PID, "here", "0"))
    made = Sweep(home, steps)
    yield made
    made.store.close()


@pytest.mark.parametrize(("status", "code"), [("complete", 0), ("failed", 1), ("interrupted", 130)])
def test_it_follows_and_exits_as_the_sweep(
    sweep: Sweep, status: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.start(2)()
    sweep.steps.todo = [
        sweep.log(note="rank 1 died; trying again"), sweep.start(2, 2), sweep.record(2),
        sweep.start(3), sweep.record(3, "failed", "rank 1 ended: SIGKILL\nmore"),
        sweep.end(status),
    ]  # fmt: skip
    assert cli.main(["watch", "small"]) == code
    text = capsys.readouterr().out
    digest = sweep.plan.digest
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
    assert not sweep.steps.todo


def test_ctrl_c_ends_the_watcher_only(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    sweep.steps.todo = [interrupt]
    assert cli.main(["watch", "small"]) == 130
    assert "ringray: interrupted" in capsys.readouterr().err
    assert sweep.store.find("small").status == "running"


# On a head


def told(sweep: Sweep) -> list[str]:
    """The lines of a whole feed, in which one trial is measured."""
    sweep.start(2)()
    sweep.steps.todo = [sweep.record(2), sweep.end("failed")]
    return [f"{json.dumps(event)}\n" for event in Feed(sweep.store, sweep.plan.digest).events()]


def test_on_a_head_one_small_job_is_followed(
    sweep: Sweep, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Running entrypoint for job x: python\nringray: warning: the store lacks its log\n"
    text += "".join(told(sweep))
    server.logs = [[text[start : start + 700] for start in range(0, len(text), 700)]]
    assert cli.main(["watch", "small", "--address", URL, "--store", "/s.db"]) == 1
    out = capsys.readouterr().out
    assert "[3/6]" in out
    assert "small  " in out
    assert server.asked == ["python -m ringray watch small --lines --store /s.db"]
    assert server.jobs == {}


def test_a_command_that_ends_before_the_sweep_is_started_again(
    sweep: Sweep, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = told(sweep)
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
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while nothing happens."""
    clock = [0.0]
    monkeypatch.setattr(watch, "LIFE_S", 3.0)
    monkeypatch.setattr(sweep.steps, "monotonic", lambda: clock[0])

    def passes() -> None:
        clock[0] += 1.0

    sweep.steps.todo = [passes] * 3
    assert cli.main(["watch", "small", "--lines"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["sweep"]["name"] == "small"
    assert [next(iter(line)) for line in lines].count("over") == 0
