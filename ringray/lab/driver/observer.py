"""Interfaces to what watches a sweep, and the summary of its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ringray.lab.trial.outcome import Outcome, TrialRow

if TYPE_CHECKING:  # the tracker imports this module and needs no plan
    from ringray.lab.plan.plan import Plan
    from ringray.lab.plan.trial import Trial


class Observer(Protocol):
    """A display of a sweep; called from the driver's thread, between trials."""

    def sweep_started(self, plan: Plan, done: dict[str, TrialRow]) -> None: ...
    def note(self, text: str) -> None: ...
    def trial_started(self, trial: Trial, attempt: int) -> None: ...
    def trial_ended(self, trial: Trial, outcome: Outcome) -> None: ...
    def sweep_ended(self, summary: Summary) -> None: ...


@dataclass(frozen=True, slots=True)
class SyncState:
    """The end of tracking: trials in MLflow, trials still missing there, and why (or None)."""

    written: int
    pending: int
    error: str | None


class Tracking(Protocol):
    """The process that projects the store into MLflow, as the driver needs it."""

    def wait_ready(self) -> None: ...
    def ask_to_finish(self, trials: int) -> None: ...
    def finish(self) -> SyncState: ...

    @property
    def ui_command(self) -> str: ...


@dataclass
class Summary:
    """The end of a sweep. ``counts``: trials by status, earlier runs included; ``gaps_ms``: from
    the end of one trial to the dispatch of the next on the same ring."""

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
        """Returns 0 if every trial ended as ok, oom or pruned, 1 if some failed, 130 if
        interrupted."""
        if self.interrupted:
            return 130
        return 1 if self.counts.get("failed", 0) + self.counts.get("timeout", 0) else 0
