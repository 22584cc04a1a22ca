"""Tests of the cluster that `cluster/local.py` starts, without one."""

from __future__ import annotations

import threading

import pytest

from cluster import local
from tests.support.place import PATIENCE


def test_a_head_that_hangs_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, answers = threading.Event(), threading.Event()

    def look() -> None:
        looks.set()
        answers.wait(PATIENCE)

    monkeypatch.setattr(local, "LAST_LOOK_S", 0.01)
    watch = local.Watch(look)
    watch.start()
    assert looks.wait(PATIENCE)
    watch.stop()
    assert watch.is_alive()  # it was left behind, in its look
    answers.set()
    watch.join(PATIENCE)
    assert not watch.is_alive()
