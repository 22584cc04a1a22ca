"""Listeners that a spec and its user ask for."""

from __future__ import annotations

from ringray.lab.driver.events import (
    Event,
    Listener,
    StopSweep,
    Summary,
    SweepEnded,
    SweepStarted,
    TrialEnded,
    TrialStarted,
)
from ringray.lab.driver.exporter import Exporter
from ringray.lab.driver.json_lines import JsonLines
from ringray.lab.plan.plan import Plan
from ringray.lab.store.store import Store
from ringray.lab.tracking import tracker
from ringray.lab.trial.outcome import Outcome, TrialRow


def listeners(plan: Plan, store: Store, *, json: str | None, tracking: bool) -> list[Listener]:
    """Returns the listeners of a sweep.

    Args:
        json: the file of ``--json``.
        tracking: False is ``--no-tracking``.

    Raises:
        UserError: ``json`` cannot be written; PlaceError: MLflow cannot be used.
    """
    asked: list[Listener] = [Exporter()]
    if plan.spec.limits.gpu_hours is not None:
        asked.append(HourLimit(plan.spec.limits.gpu_hours, store))
    if json is not None:
        asked.append(JsonLines(json))
    if plan.spec.tracking.enabled and tracking:
        asked.append(MlflowTracking(plan, store))
    return asked


class HourLimit:
    """Stops a sweep before the trial that would exceed ``limits.gpu_hours``."""

    def __init__(self, hours: float, store: Store) -> None:
        self._hours, self._store = hours, store
        self._name = ""
        self._used = 0.0  # rank seconds of the trials that have ended
        self._running: dict[str, float] = {}  # predicted rank seconds, by key

    def take(self, event: Event) -> None:
        match event:
            case SweepStarted(plan, sweep):
                self._name = sweep.name
                earlier = [recording.trial for recording in self._store.history(plan.digest)]
                rows = [*self._store.trials(plan.digest), *earlier]
                self._used = sum(_rank_seconds(row.config["ring_size"], row) for row in rows)
            case TrialStarted(trial, 1):
                needed = trial.config.ring.size * trial.measuring_s
                hours = (self._used + sum(self._running.values()) + needed) / 3600
                if hours > self._hours:
                    raise StopSweep(
                        f"limits.gpu_hours is {self._hours:g}, {self._used / 3600:.3g} are used "
                        f"and the next trial needs {needed / 3600:.3g}: `ringray resume "
                        f"{self._name} --set limits.gpu_hours=N` goes on"
                    )
                self._running[trial.key] = needed
            case TrialEnded(trial, outcome):
                self._running.pop(trial.key, None)
                self._used += _rank_seconds(trial.config.ring.size, outcome)

    def close(self) -> None:
        """Has nothing to close."""


def _rank_seconds(size: int, ended: Outcome | TrialRow) -> float:
    return size * ((ended.ended or 0.0) - (ended.started or 0.0))


class MlflowTracking:
    """The process that projects the store into MLflow.

    Raises:
        PlaceError: MLflow cannot be used, and has never taken this sweep.
    """

    def __init__(self, plan: Plan, store: Store) -> None:
        place = plan.spec.tracking
        settled = tracker.settled(store, plan.digest, place.uri)
        self._tracker = tracker.Tracker(
            store.path, plan.digest, place.uri, place.experiment, settled
        )
        self._started = False
        self._summary: Summary | None = None

    def take(self, event: Event) -> None:
        match event:
            case SweepStarted():
                self._tracker.start().wait_ready()
                self._started = True
            case SweepEnded(summary) if self._started:
                self._summary = summary
                self._tracker.ask_to_finish(summary.measured)

    def close(self) -> None:
        """Waits until it has finished, if the sweep has ended."""
        self._tracker.close()
        if self._summary is None:
            return
        state = self._tracker.finish()
        self._summary.ui_command = self._tracker.ui_command
        if state.error or state.pending:
            why = f": {state.error}" if state.error else ""
            what = f"{state.pending} trials" if state.pending else "some files"
            self._summary.tracking = f"{what} are not in MLflow yet{why}"
