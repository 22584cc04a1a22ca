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
from ringray.lab.cluster.autoscaler import AutoscalerVerdict

POLL_S = 1  # seconds between two looks, a whole number for Ray
QUIET_S = 2.0  # seconds before a wait is reported
NEVER_S = 8.0  # seconds for which the autoscaler has to refuse a group


class MovedError(RingrayError):
    """The end of a wait for a place that must be asked for anew: others took or left nodes."""


@dataclass(frozen=True)
class WaitLimits:
    """Limits of a wait for the place of a ring."""

    seconds: float  # at most, without those in which nodes booted
    note: Callable[[str], None] = print  # is told the reason whenever it changes
    will_fit: bool = True  # the cluster can have the nodes, so that a refusal is temporary
    #: Set, from any thread, when the place is not needed any more.
    stop: threading.Event = field(default_factory=threading.Event)
    moved: Callable[[], bool] = lambda: False  # returns whether it must be asked for anew
    began: float = field(default_factory=lambda: time.monotonic())
    booting: list[float] = field(default_factory=list)  # seconds in which nodes booted


def wait(group: Any, ranks: int, bundle: Mapping[str, float], wait_limits: WaitLimits) -> None:
    """Waits until the placement group ``group``, ``ranks`` times ``bundle``, has its place.

    Raises:
        MovedError: it must be asked for anew.
        PlaceError: it has none within ``wait_limits``, or the autoscaler refuses it for good.
        StoppedError: it is not needed any more.
    """
    refused: tuple[float, int] | None = None  # since when, and by which version of the state
    noted, looked = "", time.monotonic()
    while not group.wait(POLL_S):
        if wait_limits.stop.is_set():
            raise StoppedError
        if wait_limits.moved():
            raise MovedError
        verdict = autoscaler.verdict(group.id.hex())
        before, looked = looked, time.monotonic()
        if verdict is not None and verdict.booting:
            wait_limits.booting.append(looked - before)
        waited = looked - wait_limits.began
        need = ", ".join(f"{n:g} {name}" for name, n in bundle.items())
        if verdict is None or not verdict.hopeless or wait_limits.will_fit:
            refused = None
        elif refused is None:
            refused = waited, verdict.version
        elif waited - refused[0] >= NEVER_S and verdict.version > refused[1]:
            present = " and ".join(capacity.counts(ray.cluster_resources()))
            raise PlaceError(
                f"no place for a ring of {ranks}: each rank needs {need}, and the autoscaler has "
                f"no nodes to start for that; the cluster has {present or 'no CPU and no GPU'} "
                "now. Shrink ring.size, or name a larger cluster: --address"
            )
        if waited - sum(wait_limits.booting) >= wait_limits.seconds:
            raise PlaceError(
                f"no place for a ring of {ranks} after {wait_limits.seconds:g} s "
                f"(limits.place_timeout): each rank needs {need}, free now "
                f"{', '.join(filter(None, (_free(), str(verdict or ''))))}; "
                "wait for other work to end, or shrink ring.size"
            )
        text = _reason(verdict, ranks)
        if waited >= QUIET_S and text != noted:
            wait_limits.note(text)
            noted = text


def _reason(verdict: AutoscalerVerdict | None, ranks: int) -> str:
    if verdict is None or verdict.refused:
        return f"waiting for a place for {ranks} ranks, free now {_free()}"
    return f"waiting for nodes: {str(verdict) or 'the autoscaler decides'}"


def _free() -> str:
    return ", ".join(capacity.counts(ray.available_resources())) or "nothing"
