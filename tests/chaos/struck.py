"""Sweeps that something strikes in their middle."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import psutil

from tests.support import place as drive
from tests.support.place import Place

NODE = {"PYTHONPATH": f"{drive.REPOSITORY}:{drive.REPOSITORY / 'kernels'}"}
REPLICAS = 12


def faults(row: Any) -> list[dict[str, Any]]:
    return list((row.environment or {}).get("faults", ()))


def raylet_of(rank: psutil.Process) -> psutil.Process:
    """Returns the process of a rank's node."""
    raylet = rank.parent()
    assert raylet is not None
    assert "raylet" in raylet.name()
    return raylet


def ended(place: Place, name: str) -> int:
    known = any(sweep.name == name for sweep in place.sweeps())
    return sum(row.status is not None for row in place.trials(name)) if known else 0


def begun(
    place: Place, text: str, *arguments: object, tracked: bool = False
) -> subprocess.Popen[str]:
    """A sweep of which 2 trials have ended."""
    tracking = [] if tracked else ["--no-tracking"]
    driver = place.start("run", place.spec(text), *tracking, *arguments)
    name = text.split("name: ")[1].split()[0]
    drive.wait_until("2 trials", lambda: ended(place, name) >= 2 or driver.poll() is not None)
    assert driver.poll() is None, driver.communicate()
    return driver


def recovered(
    place: Place, driver: Any, name: str, strike: Callable[[], object]
) -> tuple[Any, Any]:
    """Returns the ended driver and the fault that it recorded, after ``strike`` hit one trial: it
    was tried again on a new ring, and all were measured. On a busy machine others may have been
    tried again too, each after a fault that is recorded."""
    since = time.time()

    def again() -> list[float]:
        rows = place.trials(name)
        return [row.ended for row in rows if row.attempts > 1 and (row.ended or 0) > since]

    strike()
    took = min(drive.wait_until("a trial on the new ring", again)) - since
    print(f"{name}: first trial on the new ring after {took:.1f} s")
    done = place.end(driver)
    assert done.code == 0, done.out + done.err
    rows = place.trials(name)
    assert {row.status for row in rows} == {"ok"}
    assert [row.attempts for row in rows] == [1 + len(faults(row)) for row in rows]
    retried = [row for row in rows if row.attempts > 1 and row.ended > since]
    fault, *_ = faults(min(retried, key=lambda row: row.ended))
    return done, fault
