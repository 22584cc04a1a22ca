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
from ringray.lab.cluster.autoscaler import Standing

POLL_S = 1  # seconds between two looks, a whole number for Ray
QUIET_S = 2.0  # seconds before a wait is reported
NEVER_S = 8.0  # seconds for which the autoscaler has to refuse a group


class MovedError(RingrayError):
    """The end of a wait for a place that must be asked for anew: others took or left nodes."""


@dataclass(frozen=True)
class Patience:
    """Limits of a wait. ``seconds``: at most, without those in which nodes booted, which
    ``booting`` collects; ``note``: is told the reason whenever it changes;
    ``certain``: the cluster can have the nodes, so that a refusal is temporary; ``stop``: is set,
    from any thread, when the place is not needed any more; ``moved``: returns whether it must be
    asked for anew; ``began``: on the monotonic clock."""

    seconds: float
    note: Callable[[str], None] = print
    certain: bool = True
    stop: threading.Event = field(default_factory=threading.Event)
    moved: Callable[[], bool] = lambda: False
    began: float = field(default_factory=lambda: time.monotonic())
    booting: list[float] = field(default_factory=list)


def wait(group: Any, ranks: int, bundle: Mapping[str, float], patience: Patience) -> None:
    """Waits until the placement group ``group``, ``ranks`` times ``bundle``, has its place.

    Raises:
        MovedError: it must be asked for anew.
        PlaceError: it has none after ``patience``, or the autoscaler refuses it for good.
        StoppedError: it is not needed any more.
    """
    refused: tuple[float, int] | None = None  # since when, and by which version of the state
    noted, looked = "", time.monotonic()
    while not group.wait(POLL_S):
        if patience.stop.is_set():
            raise StoppedError
        if patience.moved():
            raise MovedError
        standing = autoscaler.standing(group.id.hex())
        before, looked = looked, time.monotonic()
        if standing is not None and standing.booting:
            patience.booting.append(looked - before)
        waited = looked - patience.began
        need = ", ".join(f"{n:g} {name}" for name, n in bundle.items())
        if standing is None or not standing.hopeless or patience.certain:
            refused = None
        elif refused is None:
            refused = waited, standing.version
        elif waited - refused[0] >= NEVER_S and standing.version > refused[1]:
            present = " and ".join(capacity.counts(ray.cluster_resources()))
            raise PlaceError(
                f"no place for a ring of {ranks}: each rank needs {need}, and the autoscaler has "
                f"no nodes to start for that; the cluster has {present or 'no CPU and no GPU'} "
                "now. Shrink ring.size, or name a larger cluster: --address"
            )
        if waited - sum(patience.booting) >= patience.seconds:
            raise PlaceError(
                f"no place for a ring of {ranks} after {patience.seconds:g} s "
                f"(limits.place_timeout): each rank needs {need}, free now "
                f"{', '.join(filter(None, (_free(), str(standing or ''))))}; "
                "wait for other work to end, or shrink ring.size"
            )
        text = _said(standing, ranks)
        if waited >= QUIET_S and text != noted:
            patience.note(text)
            noted = text


def _said(standing: Standing | None, ranks: int) -> str:
    if standing is None or standing.refused:
        return f"waiting for a place for {ranks} ranks, free now {_free()}"
    return f"waiting for nodes: {str(standing) or 'the autoscaler decides'}"


def _free() -> str:
    return ", ".join(capacity.counts(ray.available_resources())) or "nothing"
