"""Waiting for the place of a ring: until other work ends, or a growing cluster has the nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from ringray.base.errors import PlaceError, RingrayError, StoppedError
from ringray.lab.cluster import autoscaler, capacity

POLL_S = 1  # seconds between two looks, a whole number for Ray
QUIET_S = 2.0  # seconds before a wait is reported


class MovedError(RingrayError):
    """The end of a wait for a place that must be asked for anew: others took or left nodes."""


@dataclass(frozen=True)
class WaitLimits:
    """Limits of a wait for the place of a ring."""

    seconds: float  # at most, without those in which nodes booted
    note: Callable[[str], None] = print  # is told the reason whenever it changes
    #: Set, from any thread, when the place is not needed any more.
    stop: threading.Event = field(default_factory=threading.Event)
    moved: Callable[[], bool] = lambda: False  # returns whether it must be asked for anew
    began: float = field(default_factory=lambda: time.monotonic())
    booting: list[float] = field(default_factory=list)  # seconds in which nodes booted


def wait(group: Any, ranks: int, bundle: Mapping[str, float], wait_limits: WaitLimits) -> None:
    """Waits until the placement group ``group``, ``ranks`` times ``bundle``, has its place.

    Raises:
        MovedError: it must be asked for anew.
        PlaceError: it has none within ``wait_limits``.
        StoppedError: it is not needed any more.
    """
    noted, looked = "", time.monotonic()
    while not group.wait(POLL_S):
        if wait_limits.stop.is_set():
            raise StoppedError
        if wait_limits.moved():
            raise MovedError
        nodes = autoscaler.starting()
        before, looked = looked, time.monotonic()
        if nodes is not None and nodes.booting:
            wait_limits.booting.append(looked - before)
        waited = looked - wait_limits.began
        if waited - sum(wait_limits.booting) >= wait_limits.seconds:
            need = ", ".join(f"{n:g} {name}" for name, n in bundle.items())
            raise PlaceError(
                f"no place for a ring of {ranks} after {wait_limits.seconds:g} s "
                f"(limits.place_timeout): each rank needs {need}, free now "
                f"{', '.join(filter(None, (_free(), str(nodes or ''))))}; "
                "wait for other work to end, or shrink ring.size"
            )
        text = f"waiting for a place for {ranks} ranks, free now {_free()}"
        if nodes is not None and str(nodes):
            text = f"waiting for nodes: {nodes}"
        if waited >= QUIET_S and text != noted:
            wait_limits.note(text)
            noted = text


def _free() -> str:
    return ", ".join(capacity.counts(ray.available_resources())) or "nothing"
