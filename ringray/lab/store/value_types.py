"""Types of the values in a store, which may be another user's, with seals that fit."""

from __future__ import annotations

from collections.abc import Iterable

from ringray.lab.trial.outcome import STATUSES, SWEEP_STATUSES, TrialRow

_LARGEST = 2**63  # of an integer in a metric; beyond it formats fail


def is_sweep(texts: Iterable[object], spec: object, status: object, *times: object) -> bool:
    """Tells whether a row of a sweep can be shown."""
    right = all(isinstance(text, str) for text in texts) and isinstance(spec, dict)
    return right and status in SWEEP_STATUSES and all(map(_is_time, times))


def is_trial(trial: TrialRow) -> bool:
    """Tells whether a row of a trial can be shown."""
    objects = (trial.config, trial.predicted, trial.metrics, trial.samples)
    if not all(isinstance(value, dict) for value in objects):
        return False
    lists = trial.samples.values()
    return (
        all(isinstance(value, str) for value in (trial.key, trial.point or ""))
        and trial.status in (None, *STATUSES)
        and all(type(value) is int for value in (trial.index, trial.attempts))
        and all(value is None or _is_time(value) for value in (trial.started, trial.ended))
        and all(map(_is_number, trial.metrics.values()))
        and all(isinstance(values, list) and all(map(_is_number, values)) for values in lists)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


def _is_time(value: object) -> bool:
    """Tells whether a value is Unix time before the year 10,000."""
    return isinstance(value, int | float) and 0 <= value < 253402300800
