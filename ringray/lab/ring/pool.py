"""The ring that trials share while it fits them, and when it is given back.

A ring holds its nodes: on a cluster that grows and shrinks, and on GPUs, it has exactly the ranks
that its trial needs, and nobody keeps one for work that has ended. On other CPUs actors are started
once, as many as any trial ahead needs, and re-formed into smaller rings.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from ringray.base.errors import StoppedError
from ringray.lab.cluster.capacity import Placement
from ringray.lab.cluster.placement_wait import Patience
from ringray.lab.ring.group import ActorRing
from ringray.lab.trial.faults import Nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ringray.lab.cluster.fit import Cluster
    from ringray.lab.spec.model import Spec
    from ringray.lab.trial.config import TrialConfig


class RingPool:
    """At most one ring at a time, on one cluster; ``note`` is told what is waited for.

    A ring that no trial has used for ``ring.idle_release`` seconds is released, from a thread of
    its own; the next trial starts another. ``nodes``: those that are set aside get no ring;
    ``stop``: set when no ring is needed any more, then what is waited for is given up.
    """

    def __init__(
        self,
        place: Cluster,
        spec: Spec,
        note: Callable[[str], None],
        nodes: Nodes | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._place, self._spec, self._note = place, spec, note
        self._nodes, self._stop = nodes or Nodes(), stop or threading.Event()
        self._ring: ActorRing | None = None
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def take(self, config: TrialConfig, ahead: Iterable[TrialConfig]) -> tuple[ActorRing, bool]:
        """A ring formed for ``config``, and whether it was warm. ``ahead``: the trials that are
        known to come, this one included.

        Raises:
            PlaceError: there is no place for it.
            RingFault: an actor failed while starting; close the ring.
            StoppedError: no ring is needed any more.
        """
        self._stop_timer()
        placement = self._placement(config)
        exact = self._place.exact(config)
        size, ring = config.ring_size, self._ring
        if ring is not None and (
            ring.placement != placement
            or (ring.capacity != size if exact else ring.capacity < size)
        ):
            self._release()
            ring = None
        warm = ring is not None and ring.size == size
        if ring is None:
            capacity = size
            if not exact:
                alike = (c.ring_size for c in ahead if self._placement(c) == placement)
                capacity = max((size, *alike))
            limits = self._spec.limits
            self._note(f"starting {capacity} {placement.device} actors")
            certain = self._place.certain(config)
            patience = Patience(limits.place_timeout, self._note, certain, self._stop)
            avoid = self._nodes.aside
            ring = self._ring = ActorRing(
                capacity, placement, limits.trial_timeout, patience, avoid
            )
        if self._stop.is_set():  # its owner may have closed this before it was there
            self._release()
            raise StoppedError
        ring.form(size)
        return ring, warm

    def _placement(self, config: TrialConfig) -> Placement:
        return replace(self._place.placement(config), memory=self._spec.limits.rank_memory)

    def rest(self) -> None:
        """No trial runs; the ring may be given back when none follows for a while."""
        self._stop_timer()
        if self._ring is None:
            return
        self._timer = threading.Timer(self._spec.ring.idle_release, self._release)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """Give the ring back."""
        self._stop_timer()
        self._release()

    def _release(self) -> None:
        with self._lock:
            ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join()  # one that has begun releases the ring before the next is started
