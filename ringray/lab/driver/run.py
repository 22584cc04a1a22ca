"""The driver: runs a plan's trials on warm rings, one after another, and records each as it ends.

The store is the truth: a trial is recorded in one transaction when its ring has reported, before
the next is dispatched, so a driver that dies loses at most the trial it was waiting for.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringray.base import provenance
from ringray.base.errors import PlaceError
from ringray.lab.cluster import connect
from ringray.lab.driver.observer import Summary
from ringray.lab.driver.schedule import Schedule
from ringray.lab.driver.signals import Signals
from ringray.lab.kinds import KINDS
from ringray.lab.plan.plan import cost_dict, trial_row
from ringray.lab.plan.pruning import Reason
from ringray.lab.store.jsonl import Lines
from ringray.lab.trial import faults
from ringray.lab.trial.outcome import (
    NOT_TRIED,
    UNASKED,
    Outcome,
    SweepInfo,
    SweepStatus,
    TrialInfo,
    TrialRow,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ringray.lab.cluster.fit import Cluster
    from ringray.lab.driver.observer import Observer, Tracking
    from ringray.lab.plan.plan import Plan, Trial
    from ringray.lab.store.store import Store

MEASURED = ("ok", "oom")  # not measured again; a pruned one is, on a cluster that can hold it
_ENDINGS: dict[int, SweepStatus] = {0: "complete", 1: "failed", 130: "interrupted"}


def run(
    plan: Plan,
    *,
    store: Store,
    observer: Observer,
    address: str | None = None,
    tracking: Callable[[], Tracking] | None = None,
    json_path: Path | None = None,
) -> Summary:
    """Run every trial of ``plan`` that the store does not hold yet.

    Args:
        store: where trials are recorded; a sweep that it knows is continued.
        address: a Ray cluster; None is RAY_ADDRESS, else an embedded local Ray.
        tracking: starts the process that projects the store into MLflow; called when the store
            knows the sweep.
        json_path: JSON Lines, appended as trials end; of a sweep that is continued, what the file
            lacks of earlier trials comes first.

    Raises:
        PlaceError: the store, the tracking server or the cluster cannot be used; before any actor
            starts, and leaving nothing of a new sweep behind.
        UserError: ``json_path`` cannot be written; before any actor starts.
    """
    began = time.monotonic()
    described = provenance.describe()
    sweep = SweepInfo(
        plan.digest, plan.spec.name, plan.spec.kind, plan.spec.canonical(), plan.spec.source,
        described,
    )  # fmt: skip
    lines = Lines(json_path, sweep)
    summary = Summary(plan.digest, plan.spec.name)
    tracker: Tracking | None = None

    def conclude() -> None:
        if tracker is not None and tracker.asked:
            state = tracker.finish()
            summary.ui_command = tracker.ui_command
            if state.error or state.pending:
                why = f": {state.error}" if state.error else ""
                summary.tracking = f"{state.pending} trials are not in MLflow yet{why}"

    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        stack.enter_context(store.lease(plan.digest, note=observer.note))
        stack.callback(conclude)  # when the ring and Ray have ended, which takes as long
        known = store.knows(plan.digest)
        earlier = {row.key: row for row in store.trials(plan.digest)} if known else {}
        done = _measured(plan, earlier, described)
        if known:
            lines.catch_up(store.changed_since(plan.digest, 0)[0])
        try:
            unasked = _unasked(store, plan, earlier)
            left_out = _left_out(plan, done, unasked)
            if left_out is None:
                observer.note(f"connecting to {connect.name(address)}")
            with signals.held():  # a Ray that is interrupted while it starts crashes at exit
                to_measure = left_out is None
                place = stack.enter_context(connect.connect(address)) if to_measure else None
            refused = _refusals(plan, place) if place else left_out or {}
            kept = {key: row.reason or "" for key, row in done.items() if row.status == "pruned"}
            store.begin(sweep, [_info(trial, refused | kept) for trial in plan.trials])
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
                if trial.pruned is not None or trial.key in refused.keys() - done.keys():
                    reason = refused.get(trial.key) or str(trial.pruned)
                    outcome = Outcome("pruned", reason, point=trial.point(described))
                    if trial.key not in earlier or earlier[trial.key].status != "pruned":
                        lines.append(trial_row(trial, outcome))
                    observer.trial_ended(trial, outcome)
            if place is not None:
                from ringray.lab.driver.trials import TrialRunner

                session = TrialRunner(plan, store, observer, place, sweep, lines, summary)
                stack.callback(session.close)
                try:
                    session.run(Schedule(plan, refused, done, unasked))
                except PlaceError:  # no room for a ring, or for a record: what is measured is kept
                    with suppress(PlaceError):
                        store.finish(plan.digest, "interrupted")
                    raise
        except KeyboardInterrupt:
            summary.interrupted = True
        if store.knows(plan.digest):
            summary.counts = _counts(store, plan.digest)
            store.finish(plan.digest, _ENDINGS[summary.exit_code])
        if tracker is not None:
            tracker.ask_to_finish(summary.measured)
    summary.wall_s = time.monotonic() - began
    observer.sweep_ended(summary)
    return summary


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
        and (
            rows[trial.key].status in MEASURED
            or (rows[trial.key].reason or "").startswith(NOT_TRIED)
        )
        and rows[trial.key].point
        == trial.point(described, (rows[trial.key].environment or {}).get("chosen"))
        and not faults.stale(
            (rows[trial.key].environment or {}).get("faults", ()), plan.spec.limits.rank_memory
        )
    }


def _unasked(store: Store, plan: Plan, rows: dict[str, TrialRow]) -> set[str] | None:
    """What a search that came to its end did not ask for; None of one that did not."""
    if not rows or store.find(plan.digest).status not in ("complete", "failed"):
        return None
    return {key for key, row in rows.items() if row.reason == UNASKED}


def _left_out(
    plan: Plan, done: dict[str, TrialRow], unasked: set[str] | None
) -> dict[str, str] | None:
    """None if anything is to be measured; else what an ended search did not ask for, and why."""
    schedule = Schedule(plan, {}, done, unasked)
    if schedule.next() is not None:
        return None
    return {trial.key: UNASKED for trial in schedule.unasked()}


def _refusals(plan: Plan, place: Cluster) -> dict[str, str]:
    """Trials that this cluster can never run, and why; PlaceError if that is all of them."""
    wrong = _planned_elsewhere(plan, place)
    # Ranks that work alone are placed one by one, and all of them at the same time.
    alone = plan.spec.sweep("ring", "size")[0] if KINDS[plan.spec.kind].ranks_alone else None
    refused = {}
    for trial in plan.runnable:
        config = replace(trial.config, ring_size=alone) if alone else trial.config
        if (reason := wrong or place.refusal(config)) is not None:
            refused[trial.key] = reason
    if len(refused) == len(plan.runnable):
        reason = next(iter(refused.values()))
        line = plan.spec.line_of(reason.field)
        raise PlaceError(f"{plan.spec.path}{f':{line}' if line else ''}: {reason}")
    return {key: str(reason) for key, reason in refused.items()}


def _planned_elsewhere(plan: Plan, place: Cluster) -> Reason | None:
    """Why ways of cutting that were laid out for one device are not tried on another."""
    device = place.device(plan.spec.ring.device)
    if not KINDS[plan.spec.kind].ranks_alone or device == plan.device:
        return None
    return Reason(
        "ring.device",
        f"got auto, which is {device} on this cluster and {plan.device} where the search was "
        "planned; name it",
    )


def _counts(store: Store, digest: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in store.trials(digest):
        counts[row.status or "pending"] = counts.get(row.status or "pending", 0) + 1
    return counts
