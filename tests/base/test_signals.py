"""Ctrl-C, SIGTERM and SIGHUP: once an exception, twice the end, always 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringray.base.signals import Signals, install, quit_at_once
from tests.support.place import REPOSITORY

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_second_signal_of_any_kind_ends_the_process(number: signal.Signals) -> None:
    """And raises nothing in the middle of what the first one has begun."""
    before = {one: signal.getsignal(one) for one in NUMBERS}
    with Signals():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert {signal.getsignal(one) for one in before} == {quit_at_once}
    assert {one: signal.getsignal(one) for one in before} == before


def _held(signals: Signals, done: list[str]) -> None:
    with signals.held():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("the whole block")


def test_what_arrives_while_ray_starts_is_raised_afterwards() -> None:
    done: list[str] = []
    with Signals() as signals, pytest.raises(KeyboardInterrupt):
        _held(signals, done)
    assert done == ["the whole block"]


def test_an_interrupt_that_a_library_lost_is_raised_by_the_driver() -> None:
    """A KeyboardInterrupt in a callback of the import system is printed and forgotten."""
    with Signals():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), Signals():
            pytest.fail("the driver began")
    with Signals():
        pass


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.SIGHUP not in install(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "where"),
    [(signal.SIGTERM, "inside"), (signal.SIGINT, "lost in"), (signal.SIGHUP, "after")],
)
def test_the_console_script_ends_with_130(
    tmp_path: Path, number: signal.Signals, where: str
) -> None:
    """Inside a command, and in an import that makes another error of it; while Python ends, the
    code is that of the command."""
    code = f"""if True:
        import atexit, os, sys
        from ringray.lab import cli
        def strike(): os.kill(os.getpid(), {int(number)})
        def main(arguments): strike()
        def lost(arguments):
            try:
                strike()
            except BaseException:
                raise ImportError("no module")
        if {where!r} == "after":
            class AtTheEnd:
                __del__ = lambda self, strike=strike: strike()
            sys.modules["kept"] = AtTheEnd()  # until after atexit
            main = lambda arguments: 0
        main.options = lost.options = ()
        import ringray.lab.cli.spec
        ringray.lab.cli.spec.schema = lost if {where!r} == "lost in" else main
        sys.argv = ["ringray", "schema"]
        cli.entry()
    """
    (tmp_path / "struck.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "struck"], capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}"},
    )  # fmt: skip
    assert done.returncode == (0 if where == "after" else 130), done.stderr
    assert "Traceback" not in done.stderr
