"""Waiting for the place of a ring: for other work to end, or for the nodes of a growing cluster."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ray

from ringray.base.errors import PlaceError, StoppedError
from ringray.lab.cluster import autoscaler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ringray.lab.cluster.autoscaler import Standing

POLL_S = 1  # seconds between two looks; Ray waits in whole ones
QUIET_S = 2.0  # a wait that is over by then is not worth a word
NEVER_S = 8.0  # for how long the autoscaler has to refuse before it is believed


@dataclass(frozen=True)
class Patience:
    """How to wait. ``seconds``: at most; ``note``: told why, whenever that changes; ``certain``:
    that the cluster can have the nodes is known, so that a refusal can only be for now; ``stop``:
    set, from any thread, when nobody needs it any more."""

    seconds: float
    note: Callable[[str], None] = print
    certain: bool = True
    stop: threading.Event = field(default_factory=threading.Event)


def wait(group: Any, ranks: int, bundle: Mapping[str, float], patience: Patience) -> None:
    """Until the placement group ``group``, of ``ranks`` times ``bundle``, has its place.

    Raises:
        PlaceError: it has none after ``patience``, or the autoscaler says that it never will.
        StoppedError: it is not needed any more.
    """
    began = time.monotonic()
    doubt = _Doubt()
    told = ""
    while not group.wait(POLL_S):
        if patience.stop.is_set():
            raise StoppedError
        waited = time.monotonic() - began
        standing = autoscaler.standing(group.id.hex())
        need = ", ".join(f"{n:g} {name}" for name, n in bundle.items())
        if not patience.certain and doubt.grown(standing, time.monotonic()):
            raise PlaceError(
                f"no place for a ring of {ranks}: each rank needs {need}, and the autoscaler has "
                f"no nodes to start for that; the cluster has {_present()}. Shrink ring.size, or "
                "name a larger cluster: --address"
            )
        if waited >= patience.seconds:
            raise PlaceError(
                f"no place for a ring of {ranks} after {patience.seconds:g} s "
                f"(limits.place_timeout): each rank needs {need}, free now "
                f"{_free() or 'nothing'}{_coming(standing)}; "
                "wait for other work to end, or shrink ring.size"
            )
        said = _said(standing, ranks)
        if waited >= QUIET_S and said != told:
            patience.note(said)
            told = said


def _said(standing: Standing | None, ranks: int) -> str:
    if standing is None or standing.refused:
        return f"waiting for a place for {ranks} ranks, free now {_free() or 'nothing'}"
    return f"waiting for nodes: {str(standing) or 'the autoscaler decides'}"


def _coming(standing: Standing | None) -> str:
    said = "" if standing is None else str(standing)
    return f", {said}" if said else ""


class _Doubt:
    """Since when the autoscaler refuses a group for a reason that time alone does not mend."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._version = 0

    def grown(self, standing: Standing | None, now: float) -> bool:
        """Whether the refusal is to be believed: nothing else uses the cluster, nothing is on its
        way, and the autoscaler has said so again some time later."""
        if standing is None or not standing.refused or standing.busy or standing.starting:
            self._since = None
            return False
        if self._since is None:
            self._since, self._version = now, standing.version
        return now - self._since >= NEVER_S and standing.version > self._version


def _free() -> str:
    free = ray.available_resources()
    return ", ".join(f"{free[name]:g} {name}" for name in ("CPU", "GPU") if free.get(name))


def _present() -> str:
    total = ray.cluster_resources()
    has = [f"{total[name]:g} {name}" for name in ("CPU", "GPU") if total.get(name)]
    return f"{' and '.join(has) or 'no CPU and no GPU'} now"
