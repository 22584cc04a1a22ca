"""Deadlines of calls that have none."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from ringray.base import deadline


def test_a_call_in_time_returns_or_raises_what_it_does() -> None:
    assert deadline.within(600, "it", int, "7") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        deadline.within(600, "it", int, "x")


def test_a_call_without_end_is_left_behind_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deadline, "SAY_S", 0.05)
    ended = threading.Event()
    with pytest.raises(TimeoutError, match="no answer in"):
        deadline.within(0.2, "the moon", ended.wait)
    ended.set()
    assert capsys.readouterr().err.startswith("ringray: waiting for the moon, ")


def test_a_thread_lives_as_long_as_what_it_started() -> None:
    until = threading.Event()
    thread = deadline.within(600, "it", threading.current_thread, until=until)
    thread.join(0.05)
    assert thread.is_alive()
    until.set()
    thread.join()


def test_a_process_with_a_call_left_behind_ends_with_its_code() -> None:
    code = """
import atexit, threading
from ringray.base import deadline
never = threading.Event()
try:
    deadline.within(0.05, "it", never.wait)
except TimeoutError:
    pass
atexit.register(never.wait)  # as Ray's, which waits for what the call waits for
print("said")
deadline.end(2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "said\n", "")
