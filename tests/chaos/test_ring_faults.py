"""Ranks that die or stall in mid-sweep, and signals that all processes of a job get."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.support import place as drive
from tests.support.place import Place, tiny

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.chaos

REPLICAS = 30


def in_its_middle(place: Place, json: Path, **changes: object) -> subprocess.Popen[str]:
    """A sweep that has ended at least 5 of its trials, each of which takes a while."""
    spec = place.spec(tiny("faulty", size=3, replicas=REPLICAS, repeats=30, **changes))
    driver = place.start("run", spec, "--json", json)
    drive.wait_until("5 trials", lambda: len(place.lines(json)) >= 5 or driver.poll() is not None)
    assert driver.poll() is None, driver.communicate()
    return driver


def test_a_killed_rank_costs_one_try(place: Place) -> None:
    json = place.home / "a.jsonl"
    driver = in_its_middle(place, json)
    old = place.ranks()
    assert len(old) == 3
    old[2].kill()
    done = place.end(driver)
    assert done.code == 0, done.out + done.err
    assert done.errors == []
    rows = place.trials("faulty")
    assert [row.status for row in rows] == ["ok"] * REPLICAS
    # A second fault can follow from the first only if a new ring formed with ranks of the old one.
    assert sorted(row.attempts for row in rows) == [1] * (REPLICAS - 1) + [2]
    assert done.out.count("trying again on a new ring") == 1
    assert "(raylet)" not in done.out
    assert len(place.lines(json)) == REPLICAS
    (parent,), children = place.mlflow("faulty")
    assert parent.info.status == "FINISHED"
    assert len(children) == REPLICAS
    place.check_nothing_is_left()


def test_without_retries_a_killed_rank_fails_its_trial(place: Place) -> None:
    json = place.home / "a.jsonl"
    driver = in_its_middle(place, json, retries=0)
    place.ranks()[1].kill()
    done = place.end(driver)
    assert done.code == 1, done.out + done.err
    rows = place.trials("faulty")
    assert sorted(row.status or "" for row in rows) == ["failed"] + ["ok"] * (REPLICAS - 1)
    (reason,) = (row.reason or "" for row in rows if row.status == "failed")
    assert reason.startswith("rank ")
    assert reason in done.out
    place.check_nothing_is_left()


@pytest.mark.exhaustive
def test_a_rank_that_freezes_while_its_ring_starts_costs_one_try(place: Place) -> None:
    """It cannot be asked yet; but the other rank of its node has started."""
    driver = place.start("run", place.spec(tiny("faulty")), "--no-tracking")

    def starting() -> list[psutil.Process]:
        return [rank for rank in place.ranks() if "__init__" in drive.title(rank)]

    drive.wait_until("a rank starts", lambda: starting() or driver.poll() is not None)
    frozen = starting()[0]
    frozen.suspend()
    done = place.end(driver)
    assert done.code == 0, done.out + done.err
    (row,) = place.trials("faulty")
    assert (row.status, row.attempts) == ("ok", 2)
    (fault,) = (row.environment or {})["faults"]
    assert (fault["kind"], fault["hop"], len(fault["ranks"])) == ("stalled", "its start", 1)
    print(f"recorded {(row.ended or 0) - (row.started or 0):.1f} s after the first try began")
    assert not frozen.is_running()
    place.check_nothing_is_left()


@pytest.mark.parametrize(
    ("number", "send"),
    [
        pytest.param(signal.SIGINT, os.killpg, id="terminal"),
        pytest.param(signal.SIGTERM, os.kill, id="kill", marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGTERM, os.killpg, id="scheduler", marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_ends_it_in_order(
    place: Place, number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    """A terminal sends Ctrl-C to all of the driver's process group, and a scheduler that stops a
    job SIGTERM: to the driver's own Ray too."""
    json = place.home / "a.jsonl"
    driver = in_its_middle(place, json)
    send(driver.pid, number)
    done = place.end(driver)
    assert done.code == 130, done.out + done.err
    assert done.errors == []
    assert "continue with: ringray resume faulty" in done.out
    (sweep,) = place.sweeps()
    assert sweep.status == "interrupted"
    # No trial was recorded as failed because its ring was taken down under it.
    assert set(sweep.counts) == {"ok"}
    assert sweep.counts["ok"] == len(place.lines(json)) < REPLICAS
    _, children = place.mlflow("faulty")
    assert len(children) == sweep.counts["ok"]
    place.check_nothing_is_left()


def test_a_killed_driver_leaves_nothing(place: Place) -> None:
    driver = in_its_middle(place, place.home / "a.jsonl")
    driver.kill()
    place.end(driver)
    # Ray's agents take 60 s to believe that their GCS is dead; ranks and tracker must not.
    place.check_nothing_is_left(but=("ray::DashboardAgent", "ray::RuntimeEnvAgent"))
    (parent,), children = place.mlflow("faulty")
    assert parent.info.status == "KILLED"
    assert len(children) == sum(row.status == "ok" for row in place.trials("faulty"))
