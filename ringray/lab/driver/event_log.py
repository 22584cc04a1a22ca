"""The event log of a running sweep, which ``watch`` and the tracker read."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from ringray.base import private_files
from ringray.lab.driver.events import Event, Note, StepEnded, SweepStarted, TrialEnded, TrialStarted
from ringray.lab.store import feed
from ringray.lab.trial.outcome import Outcome, TrialRow


class EventLog:
    """Appends events to a file beside the store, for :class:`ringray.lab.store.feed.LogReader`.

    It is no record: a full disk leaves lines out, and the file ends with its driver.
    """

    def __init__(self, store: Path, digest: str) -> None:
        self._path = feed.path_of(store, digest)
        self._file: int | None = None
        with suppress(OSError):
            self._path.unlink(missing_ok=True)  # that of a killed driver; its readers hold it open
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND
            self._file = os.open(self._path, flags, private_files.FILE)
        self._write(driver=os.getpid())

    def take(self, event: Event) -> None:
        now = time.time()
        match event:
            case SweepStarted():
                self._write(begin=now, done=list(event.done))
            case TrialStarted():
                self._write(started=event.trial.key, attempt=event.attempt, at=now)
            case StepEnded():
                self._write(curve=event.trial.index, step=event.step, values=dict(event.values))
            case TrialEnded():
                self._write(ended=event.trial.key, outcome=_outcome(event.outcome))
            case Note():
                self._write(note=event.text)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _write(self, **line: object) -> None:
        if self._file is not None:
            # A full disk may have cut the line before in its middle.
            with suppress(OSError):
                os.write(self._file, f"\n{json.dumps(line)}\n".encode())


def _outcome(outcome: Outcome | TrialRow) -> dict[str, object]:
    names = ("status", "reason", "attempts", "started", "ended")
    fields = {name: getattr(outcome, name) for name in names}
    return {**fields, "metrics": dict(outcome.metrics), "samples": feed.drawn(outcome.samples)}
