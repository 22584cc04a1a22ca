"""Work handed to rings: to one after another, or to several side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from ringray.base.errors import PlaceError
from ringray.lab.cluster.machines import Machines
from ringray.lab.driver.events import StopSweep
from ringray.lab.driver.schedule import Schedule, Work
from ringray.lab.plan.problems import problem_of
from ringray.lab.ring.pool import RingPool
from ringray.lab.ring.quarantine import Quarantine
from ringray.lab.search import METHODS
from ringray.lab.trial.outcome import Outcome

LOOK_S = 0.2  # seconds between two looks at the nodes

Measure = Callable[[Work, RingPool], Outcome]


class Dispatcher:
    """Hands the work of a schedule to ``rings`` and yields it with its outcome as it ends; the
    schedule must be told before the next.

    ``machines``: those of rings side by side, the largest of which come first, so that small ones
    fill what is left; None where ranks work alone and any ring takes any work. Points that a search
    compares are measured one after another on one of them.
    """

    def __init__(
        self,
        schedule: Schedule,
        rings: Sequence[RingPool],
        measure: Measure,
        quarantine: Quarantine,
        machines: Machines | None,
        method: str,
    ) -> None:
        self._schedule, self._rings, self._measure = schedule, list(rings), measure
        self._quarantine, self._machines = quarantine, machines
        self._compared = not METHODS[method].exhaustive
        self._waiting: list[Work] = []
        self._running: dict[Future[Outcome], tuple[Work, RingPool]] = {}
        self._own: dict[Any, RingPool] = {}  # of each study the ring that measures it

    def one_by_one(self) -> Iterator[tuple[Work, Outcome]]:
        """Uses the first ring alone."""
        (ring,) = self._rings
        while (work := self._schedule.next()) is not None:
            outcome = self._measure(work, ring)
            ring.rest()
            yield work, outcome

    def side_by_side(self, threads: ThreadPoolExecutor) -> Iterator[tuple[Work, Outcome]]:
        """Uses all rings that have room; if one raises StopSweep, when the others have ended."""
        stop: StopSweep | None = None
        while True:
            for work, ring in () if stop else self._starting():
                self._waiting.remove(work)
                self._running[threads.submit(self._measure, work, ring)] = work, ring
            if not self._running:
                if stop:
                    raise stop
                return
            self._make_room()
            several = self._machines is not None and len(self._rings) > 1
            patience = LOOK_S if several else None  # one of them may lose its place
            done, _ = wait(self._running, timeout=patience, return_when=FIRST_COMPLETED)
            for future in done:
                work, ring = self._running.pop(future)
                if isinstance(error := future.exception(), StopSweep):
                    stop = error
                    continue
                if isinstance(error, PlaceError) and len(self._rings) > 1:
                    ring.close()  # others have the room
                    self._rings.remove(ring)
                    self._own = {key: pool for key, pool in self._own.items() if pool is not ring}
                    self._waiting.append(work)
                    continue
                ring.rest()
                yield work, future.result()

    def _make_room(self) -> None:
        """Closes idle rings while another finds no place beside them, or waits for nodes of a
        growing cluster."""
        busy, machines = [ring for _, ring in self._running.values()], self._machines
        idle = [ring for ring in self._rings if ring not in busy]
        if machines is None or not any(map(machines.holds, idle)):
            return
        for work, ring in self._running.values():
            config, away = work.trial.config, self._quarantine.nodes
            if not machines.holds(ring) and (
                machines.grows
                or not machines.fits(ring.placement(config), config.ring.size, away, [ring])
            ):
                for pool in idle:
                    pool.close()
                return

    def _starting(self) -> Iterator[tuple[Work, RingPool]]:
        """Yields what can begin now."""
        if self._machines is None:  # in the order of the schedule
            while len(self._running) < len(self._rings):
                if not self._waiting and (work := self._schedule.next()) is not None:
                    self._waiting.append(work)
                ring = self._ring_for(self._waiting[0]) if self._waiting else None
                if ring is None:
                    return
                yield self._waiting[0], ring
            return
        while (work := self._schedule.next()) is not None:
            self._waiting.append(work)
        self._waiting.sort(key=lambda work: (-work.trial.config.ring.size, work.trial.index))
        refused = set()  # by what they need of nodes
        for work in list(self._waiting):
            need = work.trial.config.ring.size, work.trial.config.ring.threads
            if len(self._running) == len(self._rings) or need in refused:
                continue
            if (ring := self._ring_for(work)) is not None:
                yield work, ring
            elif not self._compared:
                refused.add(need)

    def _ring_for(self, work: Work) -> RingPool | None:
        """Returns a ring that can begin the work now; None while there is none."""
        busy = [ring for _, ring in self._running.values()]
        free = [ring for ring in self._rings if ring not in busy]
        if self._machines is None:  # the first ring compares the finalists, one after another
            free = [pool for pool in free if pool is self._rings[0]] if work.together else free
            return free[0] if free else None
        study = problem_of(work.trial) if self._compared else work.trial.key
        if study in self._own:
            free = [pool for pool in free if pool is self._own[study]]
        chosen = self._with_room(work, free, busy)
        if chosen is not None and self._compared:
            self._own[study] = chosen
        return chosen

    def _with_room(self, work: Work, free: list[RingPool], busy: list[RingPool]) -> RingPool | None:
        machines, config = self._machines, work.trial.config
        assert machines is not None
        for ring in free:
            if ring.suits(config):
                return ring
        placed = all(map(machines.holds, busy))
        if not free or not (placed or machines.grows):  # one is looking for its place
            return None
        placement, away = self._rings[0].placement(config), self._quarantine.nodes
        idle = [ring for ring in self._rings if ring not in busy]
        chosen = min(free, key=machines.holds)
        if not machines.fits(placement, config.ring.size, away, idle):
            if machines.grows:
                return chosen  # which asks for nodes
            if busy:
                return None
            for ring in idle:
                ring.close()
            return chosen  # which waits for nodes
        for ring in idle:
            if machines.fits(placement, config.ring.size, away, [chosen]):
                break
            ring.close()
        return chosen
