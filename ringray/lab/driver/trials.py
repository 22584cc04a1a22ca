"""The trials of one run on one cluster: the rings that they share, tries and tries again.

A trial is recorded in one transaction when its ring has reported, so a driver that dies loses at
most the trials that it was waiting for.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ringray.lab.kinds import KINDS
from ringray.lab.plan import deadline
from ringray.lab.plan.plan import trial_row
from ringray.lab.ring.monitor import RingFault
from ringray.lab.ring.pool import RingPool
from ringray.lab.store import traces
from ringray.lab.trial import faults
from ringray.lab.trial.faults import Fault, Nodes
from ringray.lab.trial.measurement import summarise, verdict
from ringray.lab.trial.outcome import NOT_TRIED, UNASKED, Outcome, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringray.lab.cluster.fit import Cluster
    from ringray.lab.driver.observer import Observer, Summary
    from ringray.lab.driver.schedule import Schedule, Work
    from ringray.lab.plan.plan import Plan, Trial
    from ringray.lab.store.jsonl import Lines
    from ringray.lab.store.store import Store
    from ringray.lab.trial.config import TrialConfig
    from ringray.lab.trial.measurement import RankReport
    from ringray.lab.trial.outcome import SweepInfo


class TrialRunner:
    """The trials of one run on one cluster, and the ring that they share while it fits them."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        observer: Observer,
        place: Cluster,
        sweep: SweepInfo,
        lines: Lines,
        summary: Summary,
    ) -> None:
        self._plan, self._store, self._observer = plan, store, observer
        self._sweep, self._lines, self._summary = sweep, lines, summary
        self._said: set[str] = set()
        # A kind whose ranks work alone has as many rings of one side by side.
        count = plan.spec.sweep("ring", "size")[0] if KINDS[plan.spec.kind].ranks_alone else 1
        self._place, self._nodes = place, Nodes()
        self._stop = threading.Event()  # set when this is over: nothing is waited for any more
        self._rings = [
            RingPool(place, plan.spec, observer.note, self._nodes, self._stop) for _ in range(count)
        ]
        self._ended: float | None = None  # when the last trial did, on perf_counter

    def close(self) -> None:
        """Give the rings back; a trial that loses its ring by that is not tried again."""
        self._stop.set()
        for rings in self._rings:
            rings.close()

    def run(self, schedule: Schedule) -> None:
        """Do what the search asks for until it asks no more, then give the rings back: nodes that
        nobody needs cost while the tracker writes its last."""
        for work, outcome in self._worked(schedule):
            self._ended = time.perf_counter()
            self._summary.measured += 1
            self._record(work.trial, outcome)
            schedule.tell(work, outcome)
            self._leave_out(schedule.unasked())
        self._leave_out(schedule.unasked())
        self.close()

    def _leave_out(self, trials: list[Trial]) -> None:
        for trial in trials:
            point = trial.point(self._sweep.environment)
            self._record(trial, Outcome("pruned", UNASKED, point=point))

    def _worked(self, schedule: Schedule) -> Iterator[tuple[Work, Outcome]]:
        """Work and its outcome, as it ends; each must have been told of before the next is asked
        for. Several rings work side by side, each in a thread that waits for it."""
        if len(self._rings) == 1:
            while (work := schedule.next()) is not None:
                outcome = self._measure(work, schedule, self._rings[0])
                self._rings[0].rest()
                yield work, outcome
            return
        with ThreadPoolExecutor(len(self._rings), "ring") as pool:
            try:
                yield from self._side_by_side(schedule, pool)
            finally:
                self.close()  # ends what the threads wait for

    def _side_by_side(
        self, schedule: Schedule, pool: ThreadPoolExecutor
    ) -> Iterator[tuple[Work, Outcome]]:
        free = list(self._rings)
        running: dict[Future[Outcome], tuple[Work, RingPool]] = {}
        held: Work | None = None  # the first ring compares the finalists, one after another
        while True:
            while free and (work := held or schedule.next()) is not None:
                held = None
                if work.together and free[0] is not self._rings[0]:
                    held = work
                    break
                ring = free.pop(0)
                running[pool.submit(self._measure, work, schedule, ring)] = work, ring
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                work, ring = running.pop(future)
                ring.rest()
                free = [one for one in self._rings if one in (*free, ring)]
                yield work, future.result()

    def _record(self, trial: Trial, outcome: Outcome) -> None:
        self._store.record(self._plan.digest, trial.key, outcome)
        self._lines.append(trial_row(trial, outcome))
        self._observer.trial_ended(trial, outcome)

    def _ahead(self, trial: Trial, schedule: Schedule) -> Iterator[TrialConfig]:
        """Trials for which the ring that is started now may be kept."""
        ahead = [trial] if KINDS[trial.kind].ranks_alone else schedule.ahead()
        return (one.config for one in ahead)

    def _measure(self, work: Work, schedule: Schedule, rings: RingPool) -> Outcome:
        """One trial's outcome; a ring that fails is replaced and, where that may help, the trial
        tried again."""
        trial, limits = work.trial, self._plan.spec.limits
        started, began = time.time(), time.monotonic()

        def now() -> float:  # a clock that is set meanwhile makes no trial shorter or longer
            return started + time.monotonic() - began

        met: list[Fault] = []
        for attempt in range(1, limits.retries + 2):
            self._observer.trial_started(trial, attempt)
            try:
                ring, warm = rings.take(trial.config, self._ahead(trial, schedule))
                if warm and self._ended is not None and len(self._rings) == 1:
                    self._summary.gaps_ms.append((time.perf_counter() - self._ended) * 1e3)
                config, chosen = ring.settle(work.config, trial.kind)
                if chosen:
                    self._say(chosen["source"])
                until = deadline.seconds(trial, config, limits)
                reports = ring.run(trial.kind, config, until)
            except RingFault as ended:
                fault = self._keep_stacks(trial, attempt, ended.fault)
                met.append(fault)
                if not ended.sound:
                    rings.close()
                if not self._stop.is_set():
                    self._blame(fault, trial.config)
                again = attempt <= limits.retries and not self._stop.is_set()
                if fault.infrastructure and again:
                    self._observer.note(f"{fault}; a new ring for another try")
                    self._stop.wait(faults.backoff(attempt))
                    continue
                # What earlier visits have measured is kept with it.
                had = work.before
                return Outcome(
                    fault.status, str(fault), had.metrics if had else {},
                    had.samples if had else {}, trial.point(self._sweep.environment), attempt,
                    started, now(), self._where(met),
                )  # fmt: skip
            self._nodes.ended(ring.nodes)
            assert trial.predicted is not None
            metrics, samples = summarise(trial.config, trial.predicted.flops, reports, work.before)
            self._trace(trial, reports)
            status: Status = "ok"
            if wrong := verdict(reports):
                status = "failed"
                met.append(wrong)
            reason = str(wrong) if wrong else None
            if refused := next((r.refused for r in reports if r.refused), None):
                status, reason = "pruned", NOT_TRIED + refused
            where = self._where(met, chosen)
            if KINDS[trial.kind].tunes:
                where = {**(where or self._sweep.environment)}
                where["place"] = asdict(ring.place)
            return Outcome(
                status, reason, metrics, samples, trial.point(self._sweep.environment, chosen),
                attempt, started, now(), where,
            )  # fmt: skip
        raise AssertionError("the last attempt returns")

    def _where(
        self, met: list[Fault], chosen: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """The trial's environment, if there is more to say than the sweep's says."""
        more: dict[str, Any] = {"chosen": chosen} if chosen else {}
        if met:
            more["faults"] = [fault.as_dict() for fault in met]
        return {**self._sweep.environment, **more} if more else None

    def _blame(self, fault: Fault, config: TrialConfig) -> None:
        """Leave a node alone on which rings fail, unless the trial's ring fits nowhere else."""
        if not self._nodes.failed(fault):
            return
        if self._place.spare(config, (*self._nodes.aside, fault.node_id)):
            self._nodes.set_aside(fault.node_id)
            why = "it is lost"
            if fault.kind != "node-lost":
                why = f"rings failed there {Nodes.STRIKES} times"
            self._observer.note(f"{fault.node} is set aside for the rest of this run: {why}")

    def _keep_stacks(self, trial: Trial, attempt: int, fault: Fault) -> Fault:
        """Write what the ranks were at into a file; the fault then names that."""
        if not fault.stacks:
            return fault
        path = traces.path_of(self._plan.digest, trial.key).with_suffix(f".stacks-{attempt}.txt")
        try:
            traces.keep(path, f"{fault}\n\n{fault.stacks}")
        except OSError as error:
            self._observer.note(f"no stacks {path}: {error.strerror}")
            return replace(fault, stacks="")
        self._observer.note(f"what the ranks were at: {path}")
        return replace(fault, stacks=str(path))

    def _say(self, source: str) -> None:
        """To the observer, once."""
        if source not in self._said:
            self._said.add(source)
            self._observer.note(source)

    def _trace(self, trial: Trial, reports: list[RankReport]) -> None:
        """Keep the trace, if the kind takes one; before the trial is recorded, so that whoever
        sees the record finds it."""
        if any(report.spans for report in reports):
            path = traces.path_of(self._plan.digest, trial.key)
            try:
                traces.write(path, reports)
            except OSError as error:  # the numbers are worth more than their picture
                self._observer.note(f"no trace {path}: {error.strerror}")
