"""What a search has found, from the store's rows; and the tuned choices that follow from it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ringray import tuned
from ringray.autotune.schedule import NOT_TRIED, UNASKED, Schedule
from ringray.kinds import TUNING
from ringray_kernels.backends import on_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray.autotune.schedule import Found
    from ringray.plan import Plan, Trial
    from ringray.records import TrialRow

_KEPT = ("median_ms", "p20_ms", "p80_ms", "peak_memory_bytes", "ratio", "tflops", "repeats")


def found(plan: Plan, rows: Sequence[TrialRow]) -> list[Found]:
    """The result of each study that has ended, in the plan's order."""
    refused, ended = {}, {}
    for row in rows:
        reason = row.reason or ""
        if row.status == "pruned" and not reason.startswith(NOT_TRIED):
            if reason != UNASKED:
                refused[row.key] = reason
        elif row.status is not None:
            ended[row.key] = row
    schedule = Schedule(plan, refused, ended)
    schedule.next()
    return schedule.found()


def entries(plan: Plan, rows: Sequence[TrialRow]) -> list[tuned.Entry]:
    """The best point of each study as a tuned choice."""
    by_key = {row.key: row for row in rows}
    kept: dict[tuple[tuned.Place, tuned.Bucket], tuned.Entry] = {}
    for study in found(plan, rows):
        if study.best is None:
            continue
        trial = next(trial for trial in study.trials if trial.key == study.best)
        entry = _entry(plan, trial, by_key[study.best])
        if len({one.config.threads for one in study.trials}) > 1:
            entry = replace(entry, choice={**entry.choice, "threads": trial.config.threads})
        place = entry.place, entry.bucket
        # Of kernels that were tuned one by one, each adds its blocks.
        kept[place] = _joined(kept[place], entry) if place in kept else entry
    return list(kept.values())


def _joined(one: tuned.Entry, other: tuned.Entry) -> tuned.Entry:
    cuts = [entry.choice["blocks"] for entry in (one, other)]
    if not all(isinstance(cut, str) for cut in cuts):
        return min(one, other, key=lambda entry: entry.metrics["median_ms"])
    return replace(one, choice={**one.choice, "blocks": ",".join(cuts)}, when=other.when)


def _entry(plan: Plan, trial: Trial, row: TrialRow) -> tuned.Entry:
    assert row.environment is not None
    place = tuned.Place(**row.environment["place"])
    config, chosen = trial.config, row.environment.get("chosen", {})
    strategy = TUNING[trial.kind] == "strategy"
    names = ("partition", "transport", "backward", "blocks") if strategy else ("blocks",)
    choice: dict[str, Any] = {name: chosen.get(name, getattr(config, name)) for name in names}
    choice["backend"] = on_device(config.backend, place.device)
    if choice.get("backward") == "auto":
        choice["backward"] = tuned.DEFAULTS["backward"]
    bucket = config.bucket(place.device)
    return tuned.Entry(
        "strategy" if strategy else "kernel",
        place,
        bucket if strategy else bucket.of_kernel(),
        choice,
        {name: row.metrics[name] for name in _KEPT if name in row.metrics},
        plan.digest,
        row.ended or 0.0,
    )
