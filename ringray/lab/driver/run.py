"""The driver: runs the trials of a plan, records each as it ends, and then tells listeners.

The store is the truth. One transaction records a trial when its ring has reported, before the next
is dispatched, so a driver that dies loses at most the trials that it was waiting for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from ringray.base import provenance
from ringray.base.errors import PlaceError
from ringray.base.signals import INTERRUPTED, Signals
from ringray.lab.cluster import connect
from ringray.lab.cluster.fit import Cluster
from ringray.lab.driver.event_log import EventLog
from ringray.lab.driver.events import (
    STOPPED,
    Listener,
    Listeners,
    StopSweep,
    Summary,
    SweepEnded,
    SweepStarted,
    TrialEnded,
)
from ringray.lab.driver.resume import Resume
from ringray.lab.plan.plan import Plan
from ringray.lab.plan.trial import Trial
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import NOT_REQUESTED, Outcome, SweepInfo, SweepStatus

_ENDINGS: dict[int, SweepStatus] = {
    0: "complete",
    1: "failed",
    STOPPED: "interrupted",
    INTERRUPTED: "interrupted",
}


def run(
    plan: Plan,
    *,
    store: Store,
    listeners: Sequence[Listener] = (),
    address: str | None = None,
    again: bool = False,
) -> Summary:
    """Runs every trial of ``plan`` that the store does not hold yet.

    Args:
        store: records the trials; a sweep that it knows is continued.
        listeners: are told what happens, and closed.
        address: a Ray cluster; None is RAY_ADDRESS, else an embedded local Ray.
        again: measures every trial once more; what it measured before becomes history.

    Raises:
        PlaceError: the store or the cluster cannot be used, or a listener's place; before any actor
            starts. A new sweep leaves nothing behind.
    """
    began = time.monotonic()
    sweep = Sweep(plan, store, Listeners(listeners))
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        stack.callback(sweep.listeners.close)  # the tracker finishes while rings and Ray end
        stack.enter_context(store.lease(plan.digest, note=sweep.listeners.note))
        log = EventLog(store.path, plan.digest)
        stack.callback(log.close)
        sweep.listeners.add(log)
        try:
            resume, cluster = sweep.resume(address, signals, stack, again)
            sweep.begin(resume)
            if cluster is not None:
                sweep.measure(resume, cluster, stack)
        except KeyboardInterrupt:
            sweep.summary.interrupted = True
        except StopSweep as stop:
            sweep.summary.stopped = str(stop)
        sweep.conclude()
    sweep.summary.wall_s = time.monotonic() - began
    return sweep.summary


class Sweep:
    """One run of a plan: what it records, whom it tells, and how it ends."""

    def __init__(self, plan: Plan, store: Store, listeners: Listeners) -> None:
        spec = plan.spec
        self.plan, self.store, self.listeners = plan, store, listeners
        self.info = SweepInfo(
            plan.digest, spec.name, spec.kind, spec.canonical(), spec.source, provenance.describe()
        )
        self.summary = Summary(plan.digest, spec.name, plan)

    def record(self, trial: Trial, outcome: Outcome) -> None:
        """Records how a trial ended, in the store first."""
        self.store.record(self.plan.digest, trial.key, outcome)
        self.summary.measured += outcome.reason != NOT_REQUESTED
        self.listeners.tell(TrialEnded(trial, outcome))

    def resume(
        self, address: str | None, signals: Signals, stack: ExitStack, again: bool = False
    ) -> tuple[Resume, Cluster | None]:
        """Returns what is left to do and the cluster for it, None if nothing is left."""
        resume = Resume.of(self.plan, self.store, self.info.environment, again)
        if not resume.to_do:
            return resume, None
        self.listeners.note(f"connecting to {connect.name(address)}")
        with signals.held():  # a Ray that is interrupted while it starts crashes at exit
            cluster = stack.enter_context(connect.connect(address))
        cluster.side_by_side(self.plan)  # refuses what does not fit before anything begins
        return resume.on(cluster), cluster

    def begin(self, resume: Resume) -> None:
        """Begins the sweep in the store and tells what is known.

        Raises:
            PlaceError: a listener cannot do its work; a new sweep is forgotten.
        """
        new = not self.store.knows(self.plan.digest)
        self.store.begin(self.info, resume.infos(), resume.earlier)
        for line in resume.provenance(self.info.environment):
            self.listeners.note(line)
        recorded = resume.present(self.info.environment)
        try:
            self.listeners.tell(SweepStarted(self.plan, self.info, dict(resume.done), recorded))
        except PlaceError:
            if new:
                self.store.forget(self.plan.digest)
            raise
        for trial in self.plan.trials:
            if trial.key in resume.pruned and trial.key not in resume.done:
                point = trial.point(self.info.environment)
                outcome = Outcome("pruned", resume.pruned[trial.key], point=point)
                self.listeners.tell(TrialEnded(trial, outcome))

    def measure(self, resume: Resume, cluster: Cluster, stack: ExitStack) -> None:
        """Measures the trials that are left; ``stack`` closes their rings.

        Raises:
            StopSweep: a listener stops it.
            PlaceError: no room for a ring, a record or a listener; what was measured is kept.
        """
        from ringray.lab.driver.trials import TrialRunner  # imports Ray

        environment = self.info.environment
        runner = TrialRunner(self.plan, cluster, environment, self.record, self.listeners.tell)
        stack.callback(runner.close)
        try:
            runner.run(resume.schedule())
        except (PlaceError, BrokenPipeError):
            with suppress(PlaceError):
                self.store.finish(self.plan.digest, "interrupted")
            raise

    def conclude(self) -> None:
        """Records how the sweep ended."""
        digest = self.plan.digest
        if self.store.knows(digest):
            rows = self.summary.trials = self.store.trials(digest)
            self.summary.counts = dict(Counter(row.status or "pending" for row in rows))
            self.store.finish(digest, _ENDINGS[self.summary.exit_code])
        self.listeners.tell(SweepEnded(self.summary))
