"""Events of a sweep, the listeners that its driver tells them to, and the summary of its end."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ringray.base.errors import RingrayError, reason_of
from ringray.lab.trial.outcome import Outcome, SweepInfo, TrialRow

if TYPE_CHECKING:
    from ringray.lab.plan.plan import Plan
    from ringray.lab.plan.trial import Trial

STOPPED = 4  # exit code of a sweep that a listener stopped


@dataclass(frozen=True, slots=True)
class SweepStarted:
    """The store has begun the sweep; nothing was measured yet."""

    plan: Plan
    sweep: SweepInfo

    #: Results that stand, by key.
    done: Mapping[str, TrialRow]

    #: All results of the same hardware, versions and code, by time.
    recorded: Sequence[TrialRow] = ()

    #: Seconds since then, for a view that comes later.
    ago: float = 0.0


@dataclass(frozen=True, slots=True)
class TrialStarted:
    """An attempt begins, from 1; comes from the thread of its ring."""

    trial: Trial
    attempt: int

    #: Seconds since then, for a view that comes later.
    ago: float = 0.0


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A running training has done a step, from 1."""

    trial: Trial
    step: int

    #: Values of its curves at this step, by name.
    values: Mapping[str, float]

    #: Its speed since the last such event.
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """The store has the outcome of a trial."""

    trial: Trial
    outcome: Outcome | TrialRow


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class SweepEnded:
    """The store has the end of the sweep; Ray still runs."""

    summary: Summary


Event = SweepStarted | TrialStarted | StepEnded | TrialEnded | Note | SweepEnded


@dataclass
class Summary:
    """The end of a sweep. ``counts``: trials by status, earlier runs included; ``stopped``: why a
    listener stopped it; ``tuned``: the choices that ``tune`` kept, in words; ``fruitless``: no
    point of its search could be measured."""

    digest: str
    name: str
    plan: Plan | None = field(default=None, repr=False)
    trials: list[TrialRow] = field(default_factory=list, repr=False)
    counts: dict[str, int] = field(default_factory=dict)
    measured: int = 0
    interrupted: bool = False
    stopped: str | None = None
    wall_s: float = 0.0
    tracking: str | None = None
    ui_command: str | None = None
    tuned: list[str] = field(default_factory=list)
    fruitless: bool = False

    @property
    def exit_code(self) -> int:
        """Returns 0 if every trial ended as ok, oom or pruned, 1 if some failed, 4 if a listener
        stopped the sweep, 130 if interrupted."""
        if self.interrupted:
            return 130
        if self.stopped:
            return STOPPED
        failed = self.counts.get("failed", 0) + self.counts.get("timeout", 0)
        return 1 if failed or self.fruitless else 0


class StopSweep(Exception):
    """Raised by a listener to stop the sweep before the next trial; the text says why."""


class Listener(Protocol):
    """Follows a sweep; the sweep waits for it."""

    def take(self, event: Event) -> None:
        """Takes an event.

        Raises:
            StopSweep: no further trial shall start; at a :class:`TrialStarted`, not this one, and
                those that run go on to their end.
            RingrayError, BrokenPipeError: the sweep ends now, with this error.
            Exception: any other is noted once, and the sweep goes on.
        """

    def close(self) -> None:
        """Ends what it began, when rings and Ray have ended; also after an error."""


class Listeners:
    """Tells events to all listeners, one event at a time."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self._listeners = list(listeners)
        self._failed: list[Listener] = []
        self._lock = threading.RLock()  # rings side by side have threads of their own

    def add(self, listener: Listener) -> None:
        """Adds a listener; it misses the events so far."""
        self._listeners.append(listener)

    def tell(self, event: Event) -> None:
        """Tells an event; then raises the first error that ends or stops the sweep."""
        endings: list[Exception] = []
        with self._lock:
            for listener in self._listeners:
                try:
                    listener.take(event)
                except (StopSweep, RingrayError, BrokenPipeError) as ending:
                    endings.append(ending)
                except Exception as error:  # of many types; none of them is worth a trial
                    if listener not in self._failed:
                        self._failed.append(listener)
                        self.note(f"{type(listener).__name__} failed: {reason_of(error)}")
        if endings:
            raise endings[0]

    def note(self, text: str) -> None:
        """Tells a note."""
        self.tell(Note(text))

    def close(self) -> None:
        """Closes all listeners, in their order, also after one that fails."""
        with ExitStack() as closing:
            for listener in reversed(self._listeners):
                closing.callback(listener.close)
