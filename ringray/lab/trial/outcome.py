"""Rows of the store: sweeps, trials and their outcomes.

A *sweep* is all trials of one spec; a *trial* is one measured point; an *outcome* is the end of a
trial. A trial's status is None until it ends, then one of :data:`STATUSES`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, get_args

from ringray.base.errors import PlaceError
from ringray.base.redaction import plain, shown
from ringray.lab.trial.metrics import over_predicted

Status = Literal["ok", "oom", "pruned", "timeout", "failed"]
SweepStatus = Literal["running", "complete", "failed", "interrupted"]

UNKNOWN = "unknown"  # kind of a sweep whose digest alone is left
STATUSES: tuple[Status, ...] = get_args(Status)
SWEEP_STATUSES: tuple[SweepStatus, ...] = get_args(SweepStatus)

_LONG_S = 0.5  # time of trials whose load can be told: hosts count their time in steps of 10 ms
# Reasons of pruned points: not requested by the search; prefix of a rank's own reason.
NOT_REQUESTED = "search: measured others instead"
NOT_TRIED = "not tried: "
LINE_FORMAT = 3  # of a line of ``--json``; lines without one have format 1


@dataclass(frozen=True, slots=True)
class SweepInfo:
    """A sweep as its driver announces it. ``source``: text of the spec; ``spec``: its fields."""

    digest: str
    name: str
    kind: str
    spec: dict[str, Any]
    source: str
    environment: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrialInfo:
    """A planned trial. ``pruned``: the reason why it can never run, None if it can."""

    key: str
    index: int
    config: dict[str, Any]
    predicted: dict[str, Any]
    pruned: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a trial.

    ``metrics`` are single numbers under the design's names, ``samples`` the repeats behind them;
    ``point`` is :func:`ringray.base.provenance.point_digest`; ``started`` and ``ended`` are Unix
    times in seconds; ``attempts`` counts the first try too; ``environment``: of a trial that ran
    elsewhere than the sweep's environment says.
    """

    status: Status
    reason: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: Mapping[str, list[float]] = field(default_factory=dict)
    point: str = ""
    attempts: int = 1
    started: float = 0.0
    ended: float = 0.0
    environment: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        # It may quote an error of a rank or a server; stores, logs and terminals show it.
        if self.reason is not None:
            object.__setattr__(self, "reason", shown(self.reason))


def part_of_a_path(text: str) -> str:
    """Checks a digest or a key from a store before it becomes part of a file's name.

    Raises:
        PlaceError: ``text`` is neither.
    """
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,64}", text):
        raise PlaceError(f"the store is damaged: {text[:80]!r} is neither a digest nor a key")
    return text


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A trial in the store; the fields after ``predicted`` are None until it ends."""

    key: str
    index: int
    config: dict[str, Any]
    predicted: dict[str, Any]
    status: Status | None
    reason: str | None
    metrics: dict[str, float]
    samples: dict[str, list[float]]
    point: str | None
    attempts: int
    started: float | None
    ended: float | None
    environment: dict[str, Any] | None

    def __post_init__(self) -> None:
        if self.reason is not None:  # the store may be another user's
            object.__setattr__(self, "reason", plain(self.reason))

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics, and those that compare them with their predictions."""
        return {**self.metrics, **over_predicted(self.metrics, self.predicted)}


def foreign_share(rows: Iterable[TrialRow], ranks: int, cores: int) -> float | None:
    """Returns the share of a host's ``cores`` that processes other than the ``ranks`` used while
    the trials ran; None if these were short, or their load is not known."""
    used = seconds = 0.0
    for row in rows:
        host, own = (row.metrics.get(name) for name in ("host_cpu_percent", "cpu_percent"))
        if cores and host is not None and own is not None:
            took = (row.ended or 0) - (row.started or 0)
            used += (host - own * ranks / cores) / 100 * took
            seconds += took
    return used / seconds if seconds >= _LONG_S else None


def runs_of(result: Outcome | TrialRow) -> int:
    """Returns the number of timed runs behind a result."""
    return len(result.samples.get("ms", ()))


def measured_enough(runs: Mapping[str, int]) -> list[str]:
    """Returns the points that may be the best by their numbers of runs, at least half as many as
    any other point has: a lucky single run does not decide."""
    most = max(runs.values(), default=0)
    return [key for key, count in runs.items() if 2 * count >= most]


@dataclass(frozen=True, slots=True)
class SweepRow(SweepInfo):
    """A sweep in the store. ``total`` trials; ``counts`` has a number per status, without zeros."""

    status: SweepStatus
    created: float
    updated: float
    total: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", plain(self.name))
        object.__setattr__(self, "kind", plain(self.kind))


class Kept(NamedTuple):
    """One recording of an ended trial, and its number in the sweep."""

    trial: TrialRow
    seq: int


@dataclass(frozen=True, slots=True)
class SyncState:
    """The end of tracking: trials in MLflow, trials still missing there, and why (or None)."""

    written: int
    pending: int
    error: str | None


class Tracked(NamedTuple):
    """The place of a sweep in MLflow. ``uri`` is without credentials."""

    uri: str
    experiment_id: str
    run_id: str


def selected(selector: str, sweeps: Iterable[tuple[str, str]]) -> list[str]:
    """Returns the digests of the sweeps that ``selector`` means, in the given order.

    Args:
        selector: a name, or if no sweep has it, the first 4 or more digits of a digest.
        sweeps: names and digests.
    """
    pairs = list(dict.fromkeys(sweeps))
    named = [digest for name, digest in pairs if name == selector]
    prefix = selector.lower()
    if named or not re.fullmatch(r"[0-9a-f]{4,64}", prefix):
        return named
    return [digest for _, digest in pairs if digest.startswith(prefix)]


def record_line(sweep: SweepInfo, trial: TrialRow) -> dict[str, Any]:
    """Returns a line of ``--json``; numbers that are not finite become null, as in JSON.

    The format grows only by fields; each addition raises ``format``.
    """
    ended = trial.ended and datetime.fromtimestamp(trial.ended, UTC).isoformat()
    return {
        "point": trial.point,
        "sweep": sweep.digest,
        "status": trial.status,
        "reason": trial.reason,
        "config": trial.config,
        "metrics": {name: _finite(value) for name, value in trial.metrics.items()},
        "environment": trial.environment or sweep.environment,
        "format": LINE_FORMAT,
        "time": ended,
        "name": sweep.name,
        "samples": {name: [*map(_finite, values)] for name, values in trial.samples.items()},
        "predicted": trial.predicted,
        "over_predicted": over_predicted(trial.metrics, trial.predicted),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
