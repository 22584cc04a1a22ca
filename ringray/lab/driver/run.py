"""The driver: runs the trials of a plan one after another and records each as it ends.

The store is the truth. One transaction records a trial when its ring has reported, before the next
is dispatched, so a driver that dies loses at most the trials that it was waiting for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ringray.base import provenance
from ringray.base.errors import PlaceError
from ringray.base.signals import Signals
from ringray.lab.cluster import connect
from ringray.lab.cluster.fit import Cluster
from ringray.lab.driver.exporter import Exporter
from ringray.lab.driver.observer import Observer, Summary, Tracking
from ringray.lab.driver.publisher import Publisher
from ringray.lab.driver.resume import Resume
from ringray.lab.plan.plan import Plan
from ringray.lab.plan.trial import Trial, trial_row
from ringray.lab.store import driver_state, progress
from ringray.lab.store.jsonl import Lines
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome, SweepInfo, SweepStatus

if TYPE_CHECKING:
    from ringray.lab.driver.trials import TrialRunner

_ENDINGS: dict[int, SweepStatus] = {0: "complete", 1: "failed", 130: "interrupted"}


def run(
    plan: Plan,
    *,
    store: Store,
    observer: Observer,
    address: str | None = None,
    tracking: Callable[[], Tracking] | None = None,
    json_path: Path | None = None,
    again: bool = False,
) -> Summary:
    """Runs every trial of ``plan`` that the store does not hold yet.

    Args:
        store: records the trials; a sweep that it knows is continued.
        address: a Ray cluster; None is RAY_ADDRESS, else an embedded local Ray.
        tracking: starts the projection into MLflow; called when the store knows the sweep.
        json_path: JSON Lines, appended as trials end; earlier trials that it lacks come first.
        again: measures every trial once more; what it measured before becomes history.

    Raises:
        PlaceError: the store, the tracking server or the cluster cannot be used; before any actor
            starts. A new sweep leaves nothing behind.
        UserError: ``json_path`` cannot be written; before any actor starts.
    """
    began = time.monotonic()
    publisher = Publisher(observer)
    sweep = Sweep(plan, store, publisher, json_path)
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        stack.enter_context(store.lease(plan.digest, note=observer.note))
        stack.enter_context(publisher.writing(driver_state.path_of(store.path, plan.digest)))
        stack.callback(sweep.wait_for_tracking)  # which finishes while the ring and Ray end
        try:
            resume, cluster = sweep.resume(address, signals, stack, again)
            sweep.begin(resume, tracking)
            sweep.announce(resume)
            if cluster is not None:
                sweep.measure(resume, cluster, stack)
        except KeyboardInterrupt:
            sweep.summary.interrupted = True
        sweep.conclude()
    sweep.summary.wall_s = time.monotonic() - began
    publisher.sweep_ended(sweep.summary)
    return sweep.summary


class Sweep:
    """One run of a plan: what it records, where, and how it ends."""

    def __init__(
        self, plan: Plan, store: Store, observer: Observer, json_path: Path | None = None
    ) -> None:
        spec = plan.spec
        self.plan, self.store, self.observer = plan, store, observer
        self.info = SweepInfo(
            plan.digest, spec.name, spec.kind, spec.canonical(), spec.source, provenance.describe()
        )
        self.summary = Summary(plan.digest, spec.name)
        self.exporter = Exporter(plan)
        self._lines = Lines(json_path, self.info)
        self._tracker: Tracking | None = None
        self._finishing = False  # the tracker was asked to

    def record(self, trial: Trial, outcome: Outcome) -> None:
        """Records how a trial ended, in the store first."""
        self.store.record(self.plan.digest, trial.key, outcome)
        self._lines.append(trial_row(trial, outcome))
        self.observer.trial_ended(trial, outcome)
        self.exporter.trial_ended(trial, outcome)

    def resume(
        self, address: str | None, signals: Signals, stack: ExitStack, again: bool = False
    ) -> tuple[Resume, Cluster | None]:
        """Returns what is left to do and the cluster for it, None if nothing is left."""
        resume = Resume.of(self.plan, self.store, self.info.environment, again)
        if resume.rows:
            self._lines.catch_up(resume.present(self.info.environment))
        if not resume.to_do:
            return resume, None
        self.observer.note(f"connecting to {connect.name(address)}")
        with signals.held():  # a Ray that is interrupted while it starts crashes at exit
            cluster = stack.enter_context(connect.connect(address))
        cluster.side_by_side(self.plan)  # refuses what does not fit before anything begins
        return resume.on(cluster), cluster

    def begin(self, resume: Resume, tracking: Callable[[], Tracking] | None) -> None:
        """Begins the sweep in the store and starts its tracking.

        Raises:
            PlaceError: the tracking server cannot be used; a new sweep is forgotten.
        """
        new = not self.store.knows(self.plan.digest)
        progress.clear(self.plan.digest)
        self.store.begin(self.info, resume.infos(), resume.earlier)
        try:
            if tracking is not None:
                self._tracker = tracking()
                self._tracker.wait_ready()
        except PlaceError:
            if new:
                self.store.forget(self.plan.digest)
            raise

    def announce(self, resume: Resume) -> None:
        """Tells the observer what is known; trials that were pruned before get no second line."""
        for line in resume.provenance(self.info.environment):
            self.observer.note(line)
        self.observer.sweep_started(self.plan, dict(resume.done))
        for trial in self.plan.trials:
            if trial.key not in resume.pruned or trial.key in resume.done:
                continue
            point = trial.point(self.info.environment)
            outcome = Outcome("pruned", resume.pruned[trial.key], point=point)
            if trial.key not in resume.rows or resume.rows[trial.key].status != "pruned":
                self._lines.append(trial_row(trial, outcome))
            self.observer.trial_ended(trial, outcome)

    def measure(self, resume: Resume, cluster: Cluster, stack: ExitStack) -> None:
        """Measures the trials that are left; ``stack`` closes their rings.

        Raises:
            PlaceError: no room for a ring or for a record; what was measured is kept.
        """
        stack.enter_context(self.exporter.running(resume, self.observer.note))
        runner = self.runner(cluster)
        stack.callback(runner.close)
        try:
            runner.run(resume.schedule())
        except PlaceError:
            with suppress(PlaceError):
                self.store.finish(self.plan.digest, "interrupted")
            raise

    def runner(self, cluster: Cluster) -> TrialRunner:
        """Makes what runs the trials on ``cluster``."""
        from ringray.lab.driver.trials import TrialRunner  # imports Ray

        return TrialRunner(
            self.plan,
            cluster,
            record=self.record,
            environment=self.info.environment,
            observer=self.observer,
            exporter=self.exporter,
            summary=self.summary,
        )

    def conclude(self) -> None:
        """Records how the sweep ended, and asks the tracker to finish."""
        digest = self.plan.digest
        if self.store.knows(digest):
            rows = self.store.trials(digest)
            self.summary.counts = dict(Counter(row.status or "pending" for row in rows))
            self.store.finish(digest, _ENDINGS[self.summary.exit_code])
        progress.clear(self.plan.digest)
        if self._tracker is not None:
            self._tracker.ask_to_finish(self.summary.measured)
            self._finishing = True

    def wait_for_tracking(self) -> None:
        """Waits until the tracker has finished, if it was asked to."""
        if self._tracker is None or not self._finishing:
            return
        state = self._tracker.finish()
        self.summary.ui_command = self._tracker.ui_command
        if state.error or state.pending:
            why = f": {state.error}" if state.error else ""
            what = f"{state.pending} trials" if state.pending else "some files"
            self.summary.tracking = f"{what} are not in MLflow yet{why}"
