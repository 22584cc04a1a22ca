"""Ctrl-C and SIGTERM: once an exception, twice the end."""

from __future__ import annotations

import os
import signal

import pytest

from ringray.lab.driver.signals import Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_of_either_kind_ends_the_process(number: signal.Signals) -> None:
    """And raises nothing in the middle of what the first one has begun."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    with Signals():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert {signal.getsignal(one) for one in before} == {signal.SIG_DFL}
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
