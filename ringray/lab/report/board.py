"""The state of a running sweep, as the views show it. Prints nothing and imports no rich."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ringray.base import units
from ringray.lab.report import words
from ringray.lab.report.replicas import by_point, together

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringray.lab.plan.plan import Plan, Trial
    from ringray.lab.trial.outcome import Outcome, TrialRow

_FIXED_S = 0.05  # of wall time that a trial costs beside what it computes


@dataclass
class BoardGroup:
    """The replicas of one point: one row of the live table."""

    config: dict[str, Any]
    keys: list[str] = field(default_factory=list)
    ended: dict[str, Outcome | TrialRow] = field(default_factory=dict)

    @property
    def status(self) -> str | None:
        """The worst status of the replicas that ended, None before the first."""
        found = {result.status for result in self.ended.values()}
        for status in ("failed", "timeout", "oom", "ok", "pruned"):
            if status in found:
                return status
        return None

    @property
    def reason(self) -> str | None:
        """Why it did not end well."""
        for result in self.ended.values():
            if result.status == self.status and result.reason:
                return result.reason
        return None

    def metrics(self) -> dict[str, float]:
        """Each metric's median over the replicas that are ok; the widest spread."""
        return together([one.metrics for one in self.ended.values() if one.status == "ok"])


class Board:
    """A plan and what has become of each of its trials.

    ``done``: trials that an earlier run of the sweep has measured, by key.
    """

    def __init__(self, plan: Plan, done: Mapping[str, TrialRow], device: str | None = None) -> None:
        self.plan = plan
        self.device = device or plan.spec.ring.device
        runnable = plan.runnable
        configs = {trial.key: trial.config.as_dict() for trial in runnable}
        self.fields = words.varying(configs.values())
        self.groups: list[BoardGroup] = []
        self._group_of: dict[str, BoardGroup] = {}
        for same in by_point(runnable, lambda trial: configs[trial.key]):
            group = BoardGroup(configs[same[0].key], [trial.key for trial in same])
            group.ended = {key: done[key] for key in group.keys if key in done}
            self.groups.append(group)
            self._group_of |= dict.fromkeys(group.keys, group)
        self.total = len(runnable)
        self.pruned = len(plan.trials) - self.total
        self.known = sum(len(group.ended) for group in self.groups)
        self.current: Trial | None = None
        self.attempt = 1
        self.last: BoardGroup | None = None
        self.note = ""
        self._began = time.monotonic()
        self._ended: float | None = None
        self._weight = {trial.key: _weight(trial) for trial in runnable}
        self._spent = 0.0
        self._started_at = self._began
        self._waiting = sum(
            weight for key, weight in self._weight.items() if key not in self._group_of[key].ended
        )
        self._measured = 0.0

    def group(self, trial: Trial) -> BoardGroup:
        """The row that shows ``trial``."""
        return self._group_of[trial.key]

    def label(self, trial: Trial) -> str:
        """What tells ``trial`` from the others."""
        text = words.label(trial.config.as_dict(), self.fields) or self.plan.spec.name
        replicas = self.plan.spec.measure.replicas
        return f"{text} #{trial.config.replica + 1}" if replicas > 1 else text

    def start(self, trial: Trial, attempt: int) -> None:
        """``trial`` is about to be measured."""
        self.current, self.attempt = trial, attempt
        self._started_at = time.monotonic()

    def end(self, trial: Trial, outcome: Outcome) -> int:
        """``trial`` has ended; returns how many have."""
        group = self._group_of.get(trial.key)
        if group is not None:
            if trial.key not in group.ended:
                weight = self._weight[trial.key]
                self._waiting -= weight
                self._measured += weight
                self._spent += time.monotonic() - self._started_at
            group.ended[trial.key] = outcome
            self.last = group
        self.current, self.note = None, ""
        return self.done

    def stop(self) -> None:
        """The sweep has ended: the clock stands."""
        self._ended = time.monotonic()
        self.current = None

    @property
    def done(self) -> int:
        """Trials that have ended, now or in an earlier run."""
        return sum(len(group.ended) for group in self.groups)

    @property
    def counts(self) -> dict[str, int]:
        """Trials by status."""
        found: dict[str, int] = {"pruned": self.pruned} if self.pruned else {}
        for group in self.groups:
            for result in group.ended.values():
                if result.status is not None:
                    found[result.status] = found.get(result.status, 0) + 1
        return found

    @property
    def elapsed_s(self) -> float:
        """Seconds since the sweep was shown first."""
        return (self._ended or time.monotonic()) - self._began

    @property
    def remaining_s(self) -> float | None:
        """A guess: predicted work that waits, at the pace of that which is done. None at first."""
        if not self._measured:
            return None
        return self._waiting * self._spent / self._measured


def _weight(trial: Trial) -> float:
    predicted = trial.predicted.time_ms / 1e3 if trial.predicted else 0.0
    runs = trial.config.warmup + trial.config.repeats
    return predicted * runs * (2 if trial.config.baseline else 1) + _FIXED_S


def trial_line(board: Board, trial: Trial, outcome: Outcome) -> str:
    """``[ 3/16] zigzag 8192 forward  ok  12.3 ms (12.1-12.9)  sdpa 13.0 ms  ratio 0.95``."""
    total = str(board.total)
    place = f"[{board.done:>{len(total)}}/{total}]"
    return f"{place} {board.label(trial)}  {outcome.status}  {_details(outcome, trial)}".rstrip()


def _details(outcome: Outcome, trial: Trial) -> str:
    metrics = outcome.metrics
    said = []
    if "median_ms" in metrics:
        spread = ""
        if "p20_ms" in metrics and "p80_ms" in metrics:
            spread = f" ({units.digits(metrics['p20_ms'])}-{units.digits(metrics['p80_ms'])})"
        said.append(f"{units.digits(metrics['median_ms'])} ms{spread}")
    if "baseline_ms" in metrics:
        said.append(f"{trial.config.baseline} {units.digits(metrics['baseline_ms'])} ms")
    if "ratio" in metrics:
        said.append(f"ratio {units.ratio(metrics['ratio'])}")
    if "hidden" in metrics:
        said.append(f"{units.share(metrics['hidden'])} of its transfers hidden")
    worst = worst_error(metrics)
    if worst is not None:
        said.append(f"worst error {units.digits(worst)} of its budget")
    if outcome.attempts > 1:
        said.append(f"{outcome.attempts} attempts")
    if outcome.reason:
        said.append(outcome.reason.splitlines()[0])
    return "  ".join(said)


def worst_error(metrics: Mapping[str, float]) -> float | None:
    """The largest share of its error budget that a tensor takes; None where none was compared."""
    shares = [value for name, value in metrics.items() if name.startswith("error_")]
    return max(shares, default=None)
