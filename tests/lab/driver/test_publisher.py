"""What a driver writes for those who watch it."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from ringray.lab.driver import publisher
from ringray.lab.driver.observer import Summary
from ringray.lab.driver.publisher import Publisher
from ringray.lab.store import driver_state
from tests.support.place import wait_until
from tests.support.report_rows import outcome, planned, row

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Heard:
    """An observer that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


def test_the_file_says_what_runs_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "WRITE_S", 0.0)
    made, heard, path = planned(), Heard(), tmp_path / "state.json"
    told = Publisher(heard)  # type: ignore[arg-type]

    def state() -> Any:
        return driver_state.read(path, os.getpid())

    with told.writing(path):
        assert state().done is None
        told.note("connecting")
        first, second = made.trials[:2]
        told.sweep_started(made, {first.key: row(first, outcome())})
        told.trial_started(second, 1)
        told.trial_started(second, 2)
        wait_until("both attempts", lambda: state().running)
        wait_until("the second", lambda: state().running[second.key][0] == 2)
        assert state().done == [first.key]
        assert state().notes == [(1, "connecting")]
        told.trial_ended(second, outcome())
        wait_until("the end", lambda: not state().running)
        for number in range(30):
            told.note(f"note {number}")
        wait_until("the last note", lambda: state().notes[-1] == (31, "note 29"))
        assert len(state().notes) == 20
    assert list(tmp_path.iterdir()) == []
    told.sweep_ended(Summary("", ""))
    assert [call for call in heard.calls if call != "note"] == [
        "sweep_started", "trial_started", "trial_started", "trial_ended", "sweep_ended",
    ]  # fmt: skip


def test_its_thread_leaves_signals_to_the_main_thread(tmp_path: Path) -> None:
    """Where Ray starts, whose handlers abort, the main thread alone has signals blocked."""
    before = set(threading.enumerate())
    with Publisher(Heard()).writing(tmp_path / "state.json"):  # type: ignore[arg-type]
        (thread,) = set(threading.enumerate()) - before
        status = Path(f"/proc/self/task/{thread.native_id}/status")

        def blocked() -> bool:
            (mask,) = re.findall(r"SigBlk:\s+(\w+)", status.read_text())
            return all(int(mask, 16) >> (number - 1) & 1 for number in SIGNALS)

        wait_until("its mask", blocked)


def test_a_trial_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, writes = threading.Event(), [0]

    def write(*_: Any) -> None:
        writes[0] += 1
        if writes[0] > 1:
            free.wait()

    monkeypatch.setattr(driver_state, "write", write)
    monkeypatch.setattr(publisher, "END_S", 0.0)
    made, told = planned(), Publisher(Heard())  # type: ignore[arg-type]
    with told.writing(tmp_path / "state.json"):
        for _ in range(1000):
            told.trial_started(made.trials[0], 1)
            told.trial_ended(made.trials[0], outcome())
            assert writes[0] <= 2
    free.set()


def test_a_disk_without_room_does_not_end_the_sweep(tmp_path: Path) -> None:
    told = Publisher(Heard())  # type: ignore[arg-type]
    with told.writing(tmp_path / "nowhere" / "state.json"):
        told.note("on")
