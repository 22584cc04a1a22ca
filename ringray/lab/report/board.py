"""State of a running sweep, as the views show it. Prints nothing and does not import rich."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ringray.base import units
from ringray.lab.report import words
from ringray.lab.report.replicas import groups, together
from ringray.lab.trial.metrics import METRICS, of_group
from ringray.lab.trial.outcome import Outcome, TrialRow

if TYPE_CHECKING:  # `ringray list` needs no plan, and starts fast
    from ringray.lab.plan.plan import Plan
    from ringray.lab.plan.trial import Trial

_FIXED_S = 0.05  # wall time of a trial beside its computation, seconds
_TOLD = ("median_ms", "p20_ms", "baseline_ms", "ratio", "hidden")  # in the line of a trial


@dataclass
class BoardGroup:
    """The replicas of one point: one row of the live table."""

    config: dict[str, Any]
    keys: list[str] = field(default_factory=list)
    ended: dict[str, Outcome | TrialRow] = field(default_factory=dict)

    @property
    def status(self) -> str | None:
        """The worst status of the replicas that ended, None before the first."""
        worst = ("failed", "timeout", "oom", "ok", "pruned", None)
        statuses = (outcome.status for outcome in self.ended.values())
        return min(statuses, key=worst.index, default=None)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the replicas that are ok as one."""
        good = (outcome for outcome in self.ended.values() if outcome.status == "ok")
        return together([outcome.metrics for outcome in good])


@dataclass(frozen=True)
class RunningTrial:
    """A trial that is being measured, in row ``group``."""

    group: BoardGroup
    attempt: int
    began: float = field(default_factory=lambda: time.monotonic())

    @property
    def took_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began


class Board:
    """A plan and the outcome of each of its trials so far.

    Args:
        done: trials that have ended, by key.
        ago: seconds since this run of the sweep began, which measured some of them.
    """

    def __init__(self, plan: Plan, done: Mapping[str, TrialRow], ago: float = 0.0) -> None:
        self.plan = plan
        runnable = plan.runnable
        configs = {trial.key: trial.config.as_dict() for trial in runnable}
        self.fields = words.varying(configs.values())
        self.labels = words.names(configs, plan.spec.name)  # by key
        self.groups: list[BoardGroup] = []
        self._group_of: dict[str, BoardGroup] = {}
        for same in groups(runnable, lambda trial: trial.config.changed(replica=0)):
            group = BoardGroup(configs[same[0].key], [trial.key for trial in same])
            group.ended = {key: done[key] for key in group.keys if key in done}
            self.groups.append(group)
            self._group_of |= dict.fromkeys(group.keys, group)
        self.total = len(runnable)
        self.pruned = len(plan.trials) - self.total
        self.measured_before = sum(len(group.ended) for group in self.groups)
        self.running: dict[str, RunningTrial] = {}  # by key, in the order of their begin
        self.beside = 1  # the most trials at a time so far
        self.last: BoardGroup | None = None
        self.note = ""
        self.fault = ""  # the last trial that failed, and why
        self.rows = dict(done)  # what ended, by key
        self._began = time.monotonic() - ago
        self._problems = words.varying(configs.values(), words.PROBLEM)
        self._best: tuple[object, str] = (None, "")
        self._weight = {trial.key: trial.measuring_s + _FIXED_S for trial in runnable}
        since = time.time() - ago
        self._took = {  # seconds of the trials that ended in this run
            key: (row.ended or 0.0) - (row.started or 0.0)
            for key, row in done.items()
            if ago and key in self._weight and (row.started or 0.0) >= since
        }

    def start(self, trial: Trial, attempt: int, ago: float = 0.0) -> None:
        """Notes that ``trial`` is being measured, since ``ago`` seconds."""
        began = time.monotonic() - ago
        self.running[trial.key] = RunningTrial(self._group_of[trial.key], attempt, began)
        self.beside = max(self.beside, len(self.running))

    def end(self, trial: Trial, outcome: Outcome | TrialRow) -> None:
        """Notes that ``trial`` has ended."""
        from ringray.lab.plan.trial import trial_row  # `ringray list` needs no plan

        group = self._group_of.get(trial.key)
        self.running.pop(trial.key, None)
        if group is not None:
            if trial.key not in group.ended and outcome.ended:
                self._took[trial.key] = outcome.ended - (outcome.started or 0.0)
            group.ended[trial.key] = outcome
            self.rows[trial.key] = trial_row(trial, outcome)
            self.last = group
            if outcome.status in ("failed", "timeout"):
                why = (outcome.reason or "").partition("\n")[0]
                self.fault = f"{outcome.status}: {self.labels[trial.key]}: {why}"
        self.note = ""

    def best(self, answer: Callable[[list[TrialRow]], list[str]]) -> str:
        """Returns the ``answer`` so far for the problem that is being measured; "" without any."""
        group = next((trial.group for trial in list(self.running.values())), self.last)
        if group is None:
            return ""
        problem = self._problem(group.config)
        if self._best[0] != (self.done, problem):  # too much work for each drawing
            ended = list(self.rows.values())  # other threads add to them
            rows = [row for row in ended if self._problem(row.config) == problem]
            text = (answer(rows) or [""])[0]
            where = f" of {words.label(group.config, self._problems)}" if problem and text else ""
            self._best = (self.done, problem), text and f"best{where}: {text}"
        return self._best[1]

    def _problem(self, config: Mapping[str, Any]) -> list[Any]:
        """Returns the values that tell the problem of a trial from others of the sweep."""
        return [config.get(name) for name in self._problems]

    @property
    def done(self) -> int:
        """Trials that have ended, now or in an earlier run."""
        return sum(len(group.ended) for group in self.groups)

    @property
    def counts(self) -> dict[str, int]:
        """Trials by status."""
        ended = (outcome.status for group in self.groups for outcome in group.ended.values())
        return Counter([*filter(None, ended), *["pruned"] * self.pruned])

    @property
    def elapsed_s(self) -> float:
        """Seconds since the board was made."""
        return time.monotonic() - self._began

    @property
    def remaining_s(self) -> float | None:
        """Estimate of the seconds left: the predicted work at the pace so far; None at first."""
        if not self._took:
            return None
        weight = self._weight
        waiting = sum(weight[key] for key in weight if key not in self._group_of[key].ended)
        pace = sum(self._took.values()) / sum(weight[key] for key in self._took)
        return waiting * pace / self.beside


def trial_line(board: Board, trial: Trial, outcome: Outcome | TrialRow) -> str:
    """Writes ``[ 3/16] zigzag 8192 forward  ok  12.3 ms (12.1-12.9)  sdpa 13.0 ms  ratio 0.95``."""
    total = str(board.total)
    label = f"[{board.done:>{len(total)}}/{total}] {board.labels[trial.key]}"
    return f"{label}  {outcome.status}  {_details(outcome, trial)}".rstrip()


def _details(outcome: Outcome | TrialRow, trial: Trial) -> str:
    metrics = outcome.metrics
    texts = {name: words.metric(METRICS[name], metrics) for name in _TOLD if name in metrics}
    parts = []
    if "median_ms" in texts:
        spread = f" ({texts['p20_ms'].replace('–', '-')})" if "p20_ms" in texts else ""
        parts.append(f"{texts['median_ms']} ms{spread}")
    if "baseline_ms" in texts:
        parts.append(f"{trial.config.measure.baseline} {texts['baseline_ms']} ms")
    if "ratio" in texts:
        parts.append(f"ratio {texts['ratio']}")
    if "hidden" in texts:
        parts.append(f"{texts['hidden']} of its transfers hidden")
    if (worst := worst_error(metrics)) is not None:
        parts.append(f"worst error {units.digits(worst)} of its budget")
    if outcome.attempts > 1:
        parts.append(f"{outcome.attempts} attempts")
    if outcome.reason:
        parts.append(outcome.reason.splitlines()[0])
    return "  ".join(parts)


def worst_error(metrics: Mapping[str, float]) -> float | None:
    """Returns the largest share of its error budget that a tensor takes; None without errors."""
    return max((metrics[name] for name in of_group("error") if name in metrics), default=None)
