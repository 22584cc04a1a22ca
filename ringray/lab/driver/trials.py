"""The trials of one run on one cluster: their rings, attempts and outcomes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray

from ringray.base.errors import reason_of
from ringray.instruments.progress import Progress
from ringray.lab.cluster.fit import Cluster
from ringray.lab.cluster.machines import Machines
from ringray.lab.driver.dispatch import Dispatcher
from ringray.lab.driver.events import Event, Note, StepEnded, TrialStarted
from ringray.lab.driver.schedule import Schedule, Work
from ringray.lab.plan.plan import Plan, deadline
from ringray.lab.plan.trial import Trial
from ringray.lab.predict.rates import peak_of
from ringray.lab.ring.monitor import RingFault, Watch
from ringray.lab.ring.order import crossings, divided
from ringray.lab.ring.pool import RingPool
from ringray.lab.ring.quarantine import Quarantine
from ringray.lab.store import traces
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.faults import GONE, Fault
from ringray.lab.trial.measurement import RankReport, summarise, verdict
from ringray.lab.trial.outcome import NOT_REQUESTED, NOT_TRIED, Outcome, Status

BACKOFF_S = 0.5  # pause before the second attempt; each further pause is twice as long
BACKOFF_MOST_S = 30.0


@dataclass(frozen=True)
class RetryPolicy:
    """Decides whether a trial runs again, at most ``retries`` times after the first attempt.

    Infrastructure faults say nothing about the trial. Every other fault is its result. Preemptions
    are no attempts: a cluster of spot nodes may have many.
    """

    retries: int

    def pause(self, met: Sequence[Fault]) -> float | None:
        """Returns the seconds before the next attempt after faults, None to give up."""
        attempt = sum(fault.kind != "node-preempted" for fault in met)
        if not met[-1].infrastructure or attempt > self.retries:
            return None
        return float(min(BACKOFF_MOST_S, BACKOFF_S * 2 ** max(0, attempt - 1)))


class TrialRunner:
    """Measures what a schedule asks for, on rings that trials share while they fit."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        environment: Mapping[str, Any],
        record: Callable[[Trial, Outcome], None],
        tell: Callable[[Event], None],
    ) -> None:
        """Prepares rings for the trials of ``plan`` on ``cluster``. ``record`` takes each outcome,
        which ``environment`` describes the place of."""
        self._plan, self._cluster = plan, cluster
        self._environment, self._record, self._tell = environment, record, tell
        spec = plan.spec
        self._limits, self._policy = spec.limits, RetryPolicy(spec.limits.retries)
        self._told: set[str] = set()  # notes that are made once
        self._quarantine = Quarantine()
        self._stop = threading.Event()  # set at the end: nothing waits any more
        # Where ranks work alone, as many rings of one run side by side.
        alone = spec.trial_kind.independent_ranks
        count = spec.sweep("ring", "size")[0] if alone else cluster.side_by_side(plan)
        self._machines: Machines | None = None
        if not alone and count > 1:
            shared, grows = spec.ring.concurrent is not None, cluster.reach != cluster.present
            self._machines = Machines(ray.nodes, shared=shared, grows=grows)
        shared_by_all = self._quarantine, self._stop, self._machines
        self._rings = [RingPool(cluster, spec, self._note, *shared_by_all) for _ in range(count)]

    def _note(self, text: str) -> None:
        self._tell(Note(text))

    def close(self) -> None:
        """Gives the rings back. A trial that loses its ring by that is not tried again."""
        self._stop.set()
        for rings in self._rings:
            rings.close()

    def run(self, schedule: Schedule) -> None:
        """Measures until the schedule is empty, then gives the rings back at once: idle nodes cost
        while the tracker writes its last trials."""
        for work, outcome in self._results(schedule):
            self._record(work.trial, outcome)
            schedule.tell(work, outcome)
            self._leave_out(schedule.not_requested())
        self._leave_out(schedule.not_requested())
        self.close()

    def _leave_out(self, trials: list[Trial]) -> None:
        for trial in trials:
            self._record(trial, self._outcome(trial, Outcome("pruned", NOT_REQUESTED), ()))

    def _results(self, schedule: Schedule) -> Iterator[tuple[Work, Outcome]]:
        """Yields work with its outcome as it ends; the schedule must be told before the next."""

        def measure(work: Work, rings: RingPool) -> Outcome:
            return self._measure(work, schedule, rings)

        method = self._plan.spec.search.method
        dispatcher = Dispatcher(
            schedule, self._rings, measure, self._quarantine, self._machines, method
        )
        if len(self._rings) == 1:
            yield from dispatcher.one_by_one()
            return
        with ThreadPoolExecutor(len(self._rings), "ring") as threads:
            try:
                yield from dispatcher.side_by_side(threads)
            finally:
                self.close()  # ends what the threads wait for

    # One trial

    def _measure(self, work: Work, schedule: Schedule, rings: RingPool) -> Outcome:
        """Returns the outcome of a trial after as many attempts as the policy grants."""
        started, began = time.time(), time.monotonic()
        met: list[Fault] = []
        for attempt in itertools.count(1):
            self._tell(TrialStarted(work.trial, attempt))
            try:
                outcome = self._attempt(work, schedule, rings, met)
            except RingFault as ended:
                fault = self._keep_stacks(work.trial, attempt, ended.fault)
                met.append(fault)
                if not ended.sound:
                    rings.close()
                if self._again(met, work.trial.config):
                    continue
                had = work.before or Outcome("failed")  # earlier visits to the point
                failed = Outcome(fault.status, str(fault), had.metrics, had.samples)
                outcome = self._outcome(work.trial, failed, met)
            # The wall clock may be set meanwhile, which must not change the duration.
            now = started + time.monotonic() - began
            return replace(outcome, attempts=attempt, started=started, ended=now)
        raise AssertionError("the attempts are limited")

    def _attempt(
        self, work: Work, schedule: Schedule, rings: RingPool, met: list[Fault]
    ) -> Outcome:
        """Runs a trial once.

        Raises:
            RingFault: the ring ended without a result.
        """
        trial = work.trial
        ahead = [trial] if len(self._rings) > 1 else schedule.ahead()
        ring = rings.take(trial.config, (later.config for later in ahead))
        lies = self._lies(ring.nodes, trial.config)
        config, chosen = ring.settle(work.config, trial.kind)
        if chosen:
            self._note_once(chosen["source"])
        until = deadline(trial, self._limits)
        trains = trial.kind.trains
        peak = peak_of(self._plan.on, trial.config) if trains else None
        watch = self._watch(trial, peak) if trains else None
        try:
            reports = ring.run(trial.kind, config, until.seconds, watch)
        except RingFault as ended:
            if ended.fault.kind == "timeout":
                message = f"{ended.fault.message} ({until.limit})"
                ended.fault = replace(ended.fault, message=message)
            raise
        self._quarantine.succeeded(ring.nodes)
        for text in reports[0].notes:
            self._note(text)
        assert trial.predicted is not None
        flops = reports[0].flops or trial.predicted.flops
        metrics, samples = summarise(trial.config, flops, reports, work.before, peak)
        # Before the trial is recorded: a reader of the record finds it.
        if any(report.spans for report in reports):
            self._keep(trial, ".json", traces.text(reports))
        status: Status = "ok"
        reason = None
        if wrong := verdict(reports):
            status, reason = "failed", str(wrong)
            met = [*met, wrong]
        if refused := next((r.refused for r in reports if r.refused), None):
            status, reason = "pruned", NOT_TRIED + refused
        place = ring.place if trial.kind.tunes else None
        own = {"place": place and asdict(place), "ring": lies}
        return self._outcome(trial, Outcome(status, reason, metrics, samples), met, chosen, **own)

    def _lies(self, nodes: Sequence[str], config: TrialConfig) -> dict[str, int]:
        """Returns how a ring lies on several nodes, and notes inner groups that do, too."""
        if len(set(nodes)) == 1:
            return {}
        if count := divided(nodes, config.inner):
            groups = f"{len(nodes) // config.inner} groups of {config.inner} ranks"
            text = f"{count} of {groups} lie on several nodes"
            self._note_once(text)
        return {"nodes": len(set(nodes)), "crossings": crossings(nodes)}

    def _note_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note(text)

    def _watch(self, trial: Trial, peak: float | None) -> Watch:
        """Returns what tells the steps of a running training, and its speed between them;
        ``peak``: as ``summarise`` takes it."""
        last, since = 0, 0.0
        assert trial.predicted is not None
        flops = trial.predicted.flops

        def watch(now: Progress) -> None:
            nonlocal last, since
            step, values = now.told
            if step <= last:
                return
            before, since = since, time.monotonic()
            metrics: dict[str, float] = {}
            if last:
                pace = RankReport(0, [(since - before) / (step - last)])
                metrics, _ = summarise(trial.config, flops, [pace], peak=peak)
            self._tell(StepEnded(trial, step, values, metrics))
            last = step

        return watch

    def _outcome(
        self, trial: Trial, ended: Outcome, met: Sequence[Fault], chosen: Any = None, **own: Any
    ) -> Outcome:
        """Returns how a trial ``ended``, with its point, and with the environment if it has parts
        of its ``own``."""
        sweep = dict(self._environment)
        own = {"chosen": chosen, "faults": [fault.as_dict() for fault in met], **own}
        own = {name: part for name, part in own.items() if part}
        environment = {**sweep, **own} if own else None
        return replace(ended, point=trial.point(sweep, chosen), environment=environment)

    # After a fault

    def _again(self, met: Sequence[Fault], config: TrialConfig) -> bool:
        """Decides whether the trial runs again, and waits for the pause before it does."""
        if self._stop.is_set():
            return False
        self._blame(met[-1], config)
        pause = self._policy.pause(met)
        if pause is None:
            return False
        self._note(f"{met[-1]}; trying again on a new ring")
        self._stop.wait(pause)
        return True

    def _blame(self, fault: Fault, config: TrialConfig) -> None:
        """Avoids a node on which rings fail, unless the trial's ring fits nowhere else."""
        if not self._quarantine.failed(fault):
            return
        if self._cluster.fits_without(config, (*self._quarantine.nodes, fault.node_id)):
            self._quarantine.add(fault.node_id)
            why = "it is lost"
            if fault.kind not in GONE:
                why = f"rings failed there {Quarantine.STRIKES} times"
            self._note(f"{fault.node} is excluded for the rest of this run: {why}")

    def _keep_stacks(self, trial: Trial, attempt: int, fault: Fault) -> Fault:
        """Writes the stacks of the ranks into a file; the returned fault names it."""
        if not fault.stacks:
            return fault
        path = self._keep(trial, f".stacks-{attempt}.txt", f"{fault}\n\n{fault.stacks}")
        if path:
            self._note(f"stacks of the ranks: {path}")
        return replace(fault, stacks=path)

    def _keep(self, trial: Trial, ending: str, text: str) -> str:
        """Writes a file of a trial and returns its path, "" if that fails: numbers stay without."""
        path = traces.path_of(self._plan.digest, trial.key).with_suffix(ending)
        try:
            traces.keep(path, text)
        except OSError as error:
            self._note(f"no file {path}: {reason_of(error)}")
            return ""
        return str(path)
