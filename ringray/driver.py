"""The driver: runs a plan's trials on warm rings, one after another, and records each as it ends.

The store is the truth: a trial is recorded in one transaction when its ring has reported, before
the next is dispatched, so a driver that dies loses at most the trial it was waiting for.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ringray import cluster, environment, trace
from ringray.errors import PlaceError, UserError
from ringray.measure import summarise, verdict
from ringray.plan import cost_dict
from ringray.records import (
    Outcome,
    SweepInfo,
    SweepStatus,
    TrialInfo,
    TrialRow,
    record_line,
)
from ringray.signals import Signals

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ringray.cluster import Cluster
    from ringray.measure import Report
    from ringray.plan import Plan, Trial
    from ringray.ring import Ring
    from ringray.store import Store
    from ringray.tracking import Tracker

MEASURED = ("ok", "oom")  # not measured again; a pruned one is, on a cluster that can hold it
_ENDINGS: dict[int, SweepStatus] = {0: "complete", 1: "failed", 130: "interrupted"}
BACKOFF_S = 0.5  # before the first retry; doubled for each further one


class Observer(Protocol):
    """Who watches a sweep; called from the driver's thread, between trials."""

    def sweep_started(
        self, plan: Plan, done: dict[str, TrialRow], environment: dict[str, Any]
    ) -> None: ...
    def note(self, text: str) -> None: ...
    def trial_started(self, trial: Trial, attempt: int) -> None: ...
    def trial_ended(self, trial: Trial, outcome: Outcome) -> None: ...
    def sweep_ended(self, summary: Summary) -> None: ...


@dataclass
class Summary:
    """How a sweep ended. ``counts``: trials by status, earlier runs included; ``gaps_ms``: from the
    end of one trial to the dispatch of the next on a warm ring."""

    digest: str
    name: str
    counts: dict[str, int] = field(default_factory=dict)
    measured: int = 0
    interrupted: bool = False
    wall_s: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    tracking: str | None = None
    ui_command: str | None = None

    @property
    def exit_code(self) -> int:
        """0: every trial ended as ok, oom or pruned; 1: some failed; 130: interrupted."""
        if self.interrupted:
            return 130
        return 1 if self.counts.get("failed", 0) + self.counts.get("timeout", 0) else 0


def run(
    plan: Plan,
    *,
    store: Store,
    observer: Observer,
    address: str | None = None,
    tracking: Callable[[], Tracker] | None = None,
    json_path: Path | None = None,
) -> Summary:
    """Run every trial of ``plan`` that the store does not hold yet.

    Args:
        store: where trials are recorded; a sweep that it knows is continued.
        address: a Ray cluster; None is RAY_ADDRESS, else an embedded local Ray.
        tracking: starts the process that projects the store into MLflow; called when the store
            knows the sweep.
        json_path: JSON Lines, appended as trials end.

    Raises:
        PlaceError: the store, the tracking server or the cluster cannot be used; before any actor
            starts, and leaving nothing of a new sweep behind.
        UserError: ``json_path`` cannot be written; before any actor starts.
    """
    began = time.monotonic()
    lines = _json_lines(json_path)
    summary = Summary(plan.digest, plan.spec.name)
    tracker: Tracker | None = None

    def conclude() -> None:
        if tracker is not None and tracker.asked:
            state = tracker.finish()
            summary.ui_command = tracker.ui_command
            if state.error or state.pending:
                summary.tracking = f"{state.pending} trials are not in MLflow yet: {state.error}"

    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        stack.enter_context(store.lease(plan.digest))
        stack.callback(conclude)  # when the ring and Ray have ended, which takes as long
        described = environment.describe()
        sweep = SweepInfo(
            plan.digest, plan.spec.name, plan.spec.kind, plan.spec.canonical(), plan.spec.source,
            described,
        )  # fmt: skip
        known = store.knows(plan.digest)
        earlier = {row.key: row for row in store.trials(plan.digest)} if known else {}
        done = _measured(plan, earlier, described)
        try:
            todo = [trial for trial in plan.runnable if trial.key not in done]
            if todo:
                observer.note(f"connecting to {cluster.name(address)}")
            with signals.held():  # a Ray that is interrupted while it starts crashes at exit
                place = stack.enter_context(cluster.connect(address)) if todo else None
            refused = _refusals(plan, place) if place else {}
            store.begin(sweep, [_info(trial, refused) for trial in plan.trials])
            try:
                if tracking is not None:
                    tracker = tracking()
                    tracker.wait_ready()
            except PlaceError:
                if not known:
                    store.forget(plan.digest)
                raise
            observer.sweep_started(plan, done, described)
            for trial in plan.trials:
                if trial.pruned is not None or trial.key in refused:
                    reason = refused.get(trial.key) or str(trial.pruned)
                    outcome = Outcome("pruned", reason, point=_point(trial, described))
                    if trial.key not in earlier or earlier[trial.key].status != "pruned":
                        _append(lines, sweep, trial, outcome)
                    observer.trial_ended(trial, outcome)
            if place is not None:
                session = _Session(plan, store, observer, place, sweep, lines, summary)
                stack.callback(session.close)
                try:
                    session.run([trial for trial in todo if trial.key not in refused])
                except PlaceError:  # no room for a ring after all: what is measured is kept
                    store.finish(plan.digest, "interrupted")
                    raise
        except KeyboardInterrupt:
            summary.interrupted = True
        if store.knows(plan.digest):
            summary.counts = _counts(store, plan.digest)
            store.finish(plan.digest, _ENDINGS[summary.exit_code])
        if tracker is not None:
            tracker.ask_to_finish()
    summary.wall_s = time.monotonic() - began
    observer.sweep_ended(summary)
    return summary


class _Session:
    """The trials of one run on one cluster, and the ring that they share while it fits them."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        observer: Observer,
        place: Cluster,
        sweep: SweepInfo,
        lines: Path | None,
        summary: Summary,
    ) -> None:
        self._plan, self._store, self._observer, self._place = plan, store, observer, place
        self._sweep, self._lines, self._summary = sweep, lines, summary
        self._ring: Ring | None = None
        self._ended: float | None = None  # when the last trial did, on perf_counter

    def close(self) -> None:
        """Give the ring back."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def run(self, trials: list[Trial]) -> None:
        """Run ``trials`` in their order."""
        for at, trial in enumerate(trials):
            outcome = self._measure(trial, trials[at:])
            self._ended = time.perf_counter()
            self._store.record(self._plan.digest, trial.key, outcome)
            self._summary.measured += 1
            _append(self._lines, self._sweep, trial, outcome)
            self._observer.trial_ended(trial, outcome)

    def _ring_for(self, trial: Trial, ahead: list[Trial]) -> bool:
        """Have a ring that fits ``trial``; True if it was already warm.

        A GPU ring has exactly the ranks that it needs, since idle GPUs cost. On CPU actors are
        started once, as many as any trial ahead needs, and re-formed into smaller rings.
        """
        placement = self._place.placement(trial.config)
        size = trial.config.ring_size
        ring = self._ring
        fits = ring is not None and ring.placement == placement and ring.capacity >= size
        if fits and placement.device == "cuda":
            fits = ring is not None and ring.capacity == size
        if not fits:
            from ringray.ring import Ring

            self.close()
            capacity = size
            if placement.device == "cpu":
                capacity = max(
                    t.config.ring_size
                    for t in ahead
                    if self._place.placement(t.config) == placement
                )
            self._observer.note(f"starting {capacity} {placement.device} actors")
            self._ring = Ring(capacity, placement, self._plan.spec.limits.trial_timeout)
        assert self._ring is not None
        same = fits and self._ring.size == size
        self._ring.form(size)
        return same

    def _measure(self, trial: Trial, ahead: list[Trial]) -> Outcome:
        """One trial's outcome; a ring that dies is replaced and the trial tried again."""
        from ringray.ring import RingFault

        limits = self._plan.spec.limits
        started = time.time()
        for attempt in range(1, limits.retries + 2):
            self._observer.trial_started(trial, attempt)
            try:
                warm = self._ring_for(trial, ahead)
                if warm and self._ended is not None:
                    self._summary.gaps_ms.append((time.perf_counter() - self._ended) * 1e3)
                assert self._ring is not None
                reports = self._ring.run(trial.kind, trial.config, limits.trial_timeout)
            except RingFault as fault:
                self.close()
                if fault.kind == "died" and attempt <= limits.retries:
                    self._observer.note(f"{fault}; a new ring for another try")
                    time.sleep(BACKOFF_S * 2 ** (attempt - 1))
                    continue
                status = {"oom": "oom", "timeout": "timeout"}.get(fault.kind, "failed")
                return self._outcome(trial, status, str(fault), attempt, started)
            assert trial.predicted is not None
            metrics, samples = summarise(trial.config, trial.predicted.flops, reports)
            self._trace(trial, reports)
            reason = verdict(reports)
            status = "failed" if reason else "ok"
            return self._outcome(trial, status, reason, attempt, started, metrics, samples)
        raise AssertionError("the last attempt returns")

    def _trace(self, trial: Trial, reports: list[Report]) -> None:
        """Keep the trace, if the kind takes one; before the trial is recorded, so that whoever
        sees the record finds it."""
        if any(report.spans for report in reports):
            path = trace.path_of(self._plan.digest, trial.key)
            try:
                trace.write(path, reports)
            except OSError as error:  # the numbers are worth more than their picture
                self._observer.note(f"no trace {path}: {error.strerror}")

    def _outcome(
        self,
        trial: Trial,
        status: Any,
        reason: str | None,
        attempts: int,
        started: float,
        metrics: dict[str, float] | None = None,
        samples: dict[str, list[float]] | None = None,
    ) -> Outcome:
        return Outcome(
            status, reason, metrics or {}, samples or {}, _point(trial, self._sweep.environment),
            attempts, started, time.time(),
        )  # fmt: skip


def _append(lines: Path | None, sweep: SweepInfo, trial: Trial, outcome: Outcome) -> None:
    if lines is None:
        return
    row = TrialRow(
        trial.key, trial.index, trial.config.as_dict(), cost_dict(trial), outcome.status,
        outcome.reason, dict(outcome.metrics), dict(outcome.samples), outcome.point,
        outcome.attempts, outcome.started, outcome.ended, None,
    )  # fmt: skip
    with lines.open("a") as file:
        file.write(json.dumps(record_line(sweep, row)) + "\n")


def _point(trial: Trial, described: dict[str, Any]) -> str:
    return environment.point_digest({"kind": trial.kind, **trial.config.as_dict()}, described)


def _info(trial: Trial, refused: dict[str, str]) -> TrialInfo:
    pruned = str(trial.pruned) if trial.pruned else refused.get(trial.key)
    return TrialInfo(trial.key, trial.index, trial.config.as_dict(), cost_dict(trial), pruned)


def _measured(
    plan: Plan, rows: dict[str, TrialRow], described: dict[str, Any]
) -> dict[str, TrialRow]:
    """Trials that need not run: they ended well, with this code on this hardware."""
    return {
        trial.key: rows[trial.key]
        for trial in plan.runnable
        if trial.key in rows
        and rows[trial.key].status in MEASURED
        and rows[trial.key].point == _point(trial, described)
    }


def _refusals(plan: Plan, place: Cluster) -> dict[str, str]:
    """Trials that this cluster can never run, and why; PlaceError if that is all of them."""
    refused = {
        trial.key: reason
        for trial in plan.runnable
        if (reason := place.refusal(trial.config)) is not None
    }
    if len(refused) == len(plan.runnable):
        reason = next(iter(refused.values()))
        line = plan.spec.line_of(reason.field)
        raise PlaceError(f"{plan.spec.path}{f':{line}' if line else ''}: {reason}")
    return {key: str(reason) for key, reason in refused.items()}


def _counts(store: Store, digest: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in store.trials(digest):
        counts[row.status or "pending"] = counts.get(row.status or "pending", 0) + 1
    return counts


def _json_lines(path: Path | None) -> Path | None:
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise UserError(
            f"--json {path}: {error.strerror}; name a file that can be written"
        ) from None
    return path
