"""The ring that trials share while it fits them.

A ring holds its nodes. On GPUs, and on a cluster that grows and shrinks, it has exactly the ranks
of its trial, and so has one of several side by side. On other CPUs actors start once, as many as
any known trial needs, and are re-formed into smaller rings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ringray.base.errors import PlaceError, StoppedError
from ringray.lab.cluster.capacity import Placement
from ringray.lab.cluster.fit import Cluster
from ringray.lab.cluster.machines import Machines
from ringray.lab.cluster.placement_wait import MovedError, WaitLimits
from ringray.lab.plan.plan import TIMEOUT_S
from ringray.lab.ring.group import ActorRing
from ringray.lab.ring.quarantine import Quarantine
from ringray.lab.specs.model import Spec
from ringray.lab.trial.config import TrialConfig
from ringray_kernels.backends import BLOCKS, on_device

MOVED_S = 0.1  # seconds before a place is asked for anew


class RingPool:
    """At most one ring at a time, on one cluster; ``note`` is told about waiting. ``machines``: of
    all pools of a run whose rings work side by side.

    A timer thread releases a ring that is idle for ``ring.idle_release`` seconds; the next trial
    starts another. ``stop``: set when no ring is needed any more, which ends all waiting.
    """

    def __init__(
        self,
        cluster: Cluster,
        spec: Spec,
        note: Callable[[str], None],
        quarantine: Quarantine | None = None,
        stop: threading.Event | None = None,
        machines: Machines | None = None,
    ) -> None:
        self._machines = machines
        self._cluster, self._spec, self._note = cluster, spec, note
        self._quarantine, self._stop = quarantine or Quarantine(), stop or threading.Event()
        self._ring: ActorRing | None = None
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def take(self, config: TrialConfig, ahead: Iterable[TrialConfig]) -> ActorRing:
        """Returns a ring formed for ``config``.

        ``ahead``: the trials that are known to come, this one included.

        Raises:
            PlaceError: the ring cannot be placed, or a node cannot run the trial's kernels.
            RingFault: an actor failed while starting; close the ring.
            StoppedError: no ring is needed any more.
        """
        self._stop_timer()
        if not self.suits(config):
            self._release()
        size, ring, placement = config.ring.size, self._ring, self.placement(config)
        if ring is None:
            alike = (c.ring.size for c in ahead if self.placement(c) == placement)
            sizes = () if self._needs_exact_size(config) else alike
            ring = self._ring = self._started(config, placement, max((size, *sizes)))
        _check_toolchain(ring, config)
        if self._stop.is_set():  # close() may have run before the ring existed
            self._release()
            raise StoppedError
        ring.form(size, config.ring.order, config.inner, config.measure.seed)
        return ring

    def _started(self, config: TrialConfig, placement: Placement, capacity: int) -> ActorRing:
        limits = self._spec.limits
        self._note(f"starting {capacity} {placement.device} actors")
        wait_limits = WaitLimits(limits.place_timeout, self._note, self._stop)
        if self._machines is None:
            timeout = limits.trial_timeout or TIMEOUT_S
            return ActorRing(capacity, placement, timeout, wait_limits, self._quarantine.nodes)
        while not self._stop.wait(MOVED_S):
            try:
                return self._beside(self._machines, config, capacity, wait_limits)
            except MovedError:
                continue
            except BaseException:
                self._machines.release(self)
                raise
        raise StoppedError

    def _beside(
        self, machines: Machines, config: TrialConfig, capacity: int, wait_limits: WaitLimits
    ) -> ActorRing:
        """Starts a ring where no other ring of the run is.

        Raises:
            MovedError: other rings took or left nodes before it had its own.
        """
        placement = self.placement(config)  # nodes may have come that can hold it alone
        taken = machines.closed(placement)

        def on_placed(nodes: Sequence[str]) -> None:
            if not machines.take(self, placement, nodes):
                raise MovedError

        wait_limits = replace(wait_limits, moved=lambda: machines.closed(placement) != taken)
        avoid = (*self._quarantine.nodes, *taken)
        timeout = self._spec.limits.trial_timeout or TIMEOUT_S
        return ActorRing(capacity, placement, timeout, wait_limits, avoid, on_placed)

    def placement(self, config: TrialConfig) -> Placement:
        """Returns the needs of the trial's ring."""
        # With a budget a rank counts its tensors itself.
        counted = config.training and config.training.budget
        limit = None if counted else self._spec.limits.rank_memory
        placement = replace(self._cluster.placement(config), memory=limit)
        if self._machines is None:
            return placement
        return self._machines.placement(placement, config.ring.size, self._quarantine.nodes)

    def suits(self, config: TrialConfig) -> bool:
        """Returns whether there is a ring that the trial can take as it is, or re-formed."""
        ring, size = self._ring, config.ring.size
        if ring is None or ring.placement != self.placement(config):
            return False
        if self._machines is not None and set(ring.nodes) & set(self._quarantine.nodes):
            return False
        return ring.capacity == size if self._needs_exact_size(config) else ring.capacity >= size

    def _needs_exact_size(self, config: TrialConfig) -> bool:
        return self._machines is not None or self._cluster.needs_exact_size(config)

    def rest(self) -> None:
        """Starts the idle time of the ring, which the next trial ends."""
        self._stop_timer()
        if self._ring is not None:
            self._timer = threading.Timer(self._spec.ring.idle_release, self._release)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """Gives the ring back."""
        self._stop_timer()
        self._release()

    def _release(self) -> None:
        with self._lock:
            ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()
        if self._machines is not None:
            self._machines.release(self)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join()  # one that has fired releases the ring before the next ring starts


def _check_toolchain(ring: ActorRing, config: TrialConfig) -> None:
    """Raises PlaceError if a rank lacks what Triton needs to compile the trial's kernels."""
    backend = on_device(config.strategy.backend, ring.placement.device)
    for rank in ring.ranks if BLOCKS[backend] == "tiles" else ():
        if rank.lacks:
            raise PlaceError(f"backend {backend} cannot start on {rank.address}: {rank.lacks}")
