"""What a search has found, from the store's rows; and the tuned choices that follow from it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringray.lab.driver.schedule import Schedule, outcome_of, studies
from ringray.lab.kinds import KINDS
from ringray.lab.trial.metrics import columns
from ringray.lab.trial.outcome import NOT_TRIED, UNASKED
from ringray.tuning import table as tuned
from ringray_kernels.backends import on_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray.lab.driver.schedule import StudyResult
    from ringray.lab.plan.plan import Plan, Trial
    from ringray.lab.trial.config import TrialConfig
    from ringray.lab.trial.outcome import TrialRow


def found(plan: Plan, rows: Sequence[TrialRow], *, over: bool) -> list[StudyResult]:
    """The result of each study that has ended, in the plan's order: all of them, where the sweep is
    ``over``."""
    refused, ended = {}, {}
    for row in rows:
        reason = row.reason or ""
        if row.status == "pruned" and not reason.startswith(NOT_TRIED):
            if reason != UNASKED:
                refused[row.key] = reason
        elif row.status is not None:
            ended[row.key] = row
    if over:
        groups = studies([trial for trial in plan.runnable if trial.key not in refused])
        return [outcome_of(group, ended, plan.spec.search.objectives) for group in groups]
    schedule = Schedule(plan, refused, ended)
    schedule.next()
    return schedule.found()


def entries(plan: Plan, rows: Sequence[TrialRow]) -> list[tuned.Entry]:
    """The best point of each study of a sweep that is over, as a tuned choice. Of several problems
    that share a bucket the largest one has it."""
    by_key = {row.key: row for row in rows}
    kept: dict[tuple[tuned.Place, tuned.Bucket], tuple[TrialConfig, tuned.Entry]] = {}
    for study in found(plan, rows, over=True):
        if study.best is None or not (by_key[study.best].environment or {}).get("place"):
            continue  # nothing was measured, or where was lost with a part of the store
        trial = next(trial for trial in study.trials if trial.key == study.best)
        entry = _entry(plan, trial, by_key[study.best])
        if len({one.config.threads for one in study.trials}) > 1:
            entry = replace(entry, choice={**entry.choice, "threads": trial.config.threads})
        at, problem = (entry.place, entry.bucket), replace(trial.config, blocks=None, replica=0)
        if at in kept and kept[at][0] == problem:
            # Of kernels that are tuned one by one, each adds its blocks.
            entry = _joined(kept[at][1], entry)
        elif at in kept and _size(kept[at][0]) > _size(problem):
            continue
        kept[at] = problem, entry
    return [entry for _, entry in kept.values()]


def _size(problem: TrialConfig) -> int:
    return (
        problem.batch
        * problem.heads
        * problem.seq_len
        * min(problem.seq_len, (problem.window or problem.seq_len) + 1)
    )


def _joined(one: tuned.Entry, other: tuned.Entry) -> tuned.Entry:
    cuts = [entry.choice["blocks"] for entry in (one, other)]
    return replace(one, choice={**one.choice, "blocks": ",".join(cuts)}, when=other.when)


def _entry(plan: Plan, trial: Trial, row: TrialRow) -> tuned.Entry:
    assert row.environment is not None
    place = tuned.Place(**row.environment["place"])
    config, chosen = trial.config, row.environment.get("chosen", {})
    strategy = KINDS[trial.kind].tunes == "strategy"
    names = ("partition", "transport", "backward", "blocks") if strategy else ("blocks",)
    choice: dict[str, Any] = {name: chosen.get(name, getattr(config, name)) for name in names}
    choice["backend"] = on_device(config.backend, place.device)
    if choice.get("backward") == "auto":
        choice["backward"] = tuned.DEFAULTS["backward"]
    buckets = config.buckets(place.device)
    return tuned.Entry(
        "strategy" if strategy else "kernel",
        place,
        buckets.strategy if strategy else buckets.kernel,
        choice,
        {one.name: row.metrics[one.name] for one in columns("tuned") if one.name in row.metrics},
        plan.digest,
        row.ended or 0.0,
    )
