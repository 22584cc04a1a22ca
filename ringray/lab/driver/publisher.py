"""The state of a sweep, written for other processes while it runs; nothing waits for the file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ringray.base.signals import leave_to_main
from ringray.lab.driver.observer import Observer, Summary
from ringray.lab.store import driver_state
from ringray.lab.store.driver_state import DriverState
from ringray.lab.trial.outcome import Outcome, TrialRow

if TYPE_CHECKING:
    from ringray.lab.plan.plan import Plan
    from ringray.lab.plan.trial import Trial

WRITE_S = 0.3  # seconds between two writes, at least
END_S = 2.0  # seconds for the last write
_NOTES = 20  # that are kept


class Publisher:
    """An observer that tells another one, and notes what it tells for ``driver_state``."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._state = DriverState(os.getpid(), time.time())
        self._changed = threading.Event()
        self._told = 0  # notes

    def sweep_started(self, plan: Plan, done: dict[str, TrialRow]) -> None:
        self._state.done = list(done)
        self._changed.set()
        self._observer.sweep_started(plan, done)

    def note(self, text: str) -> None:
        with self._lock:
            self._told += 1
            self._state.notes = [*self._state.notes, (self._told, text)][-_NOTES:]
        self._changed.set()
        self._observer.note(text)

    def trial_started(self, trial: Trial, attempt: int) -> None:
        with self._lock:
            self._state.running[trial.key] = attempt, time.time()
        self._changed.set()
        self._observer.trial_started(trial, attempt)

    def trial_ended(self, trial: Trial, outcome: Outcome) -> None:
        with self._lock:
            self._state.running.pop(trial.key, None)
        self._changed.set()
        self._observer.trial_ended(trial, outcome)

    def sweep_ended(self, summary: Summary) -> None:
        self._observer.sweep_ended(summary)

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Writes changes to ``path`` within the block, and then removes it."""
        over = threading.Event()
        driver_state.write(path, self._state)  # the first without a delay: a driver begins
        thread = threading.Thread(target=self._write, args=(path, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            self._changed.set()
            thread.join(END_S)
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _write(self, path: Path, over: threading.Event) -> None:
        leave_to_main()
        while self._changed.wait() and not over.is_set():
            self._changed.clear()
            with self._lock:
                state = DriverState(**{**vars(self._state), "running": dict(self._state.running)})
            driver_state.write(path, state)
            over.wait(WRITE_S)
