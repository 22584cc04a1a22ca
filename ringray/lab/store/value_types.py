"""Types of the values in a store, which may be another user's, with seals that fit."""

from __future__ import annotations

from ringray.lab.trial.outcome import STATUSES, SWEEP_STATUSES, TrialRow

_LARGEST = 2**63  # of an integer in a metric; beyond it formats fail


def is_sweep(
    digest: object, name: object, kind: object, spec: object, source: object,
    status: object, created: object, updated: object,
) -> bool:  # fmt: skip
    """Tells whether a row of a sweep can be shown."""
    return (
        all(isinstance(one, str) for one in (digest, name, kind, source))
        and status in SWEEP_STATUSES
        and isinstance(spec, dict)
        and _is_time(created)
        and _is_time(updated)
    )


def is_trial(trial: TrialRow) -> bool:
    """Tells whether a row of a trial can be shown."""
    return (
        all(isinstance(one, str) for one in (trial.key, trial.point or ""))
        and trial.status in (None, *STATUSES)
        and all(type(one) is int for one in (trial.index, trial.attempts))
        and all(one is None or _is_time(one) for one in (trial.started, trial.ended))
        and all(isinstance(one, dict) for one in (trial.config, trial.predicted))
        and isinstance(trial.metrics, dict)
        and isinstance(trial.samples, dict)
        and all(map(_is_number, trial.metrics.values()))
        and all(
            isinstance(one, list) and all(map(_is_number, one)) for one in trial.samples.values()
        )
    )


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


def _is_time(value: object) -> bool:
    """Tells whether a value is Unix time before the year 10,000."""
    return isinstance(value, int | float) and 0 <= value < 253402300800
