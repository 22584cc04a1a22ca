"""``--json``: one line per trial, appended as trials end.

The store is written first. A line that is missing because its driver was killed in between, or the
disk was full, is written when the sweep is continued with the same file.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringray.base import output_files
from ringray.base.errors import PlaceError, UserError, reason_of
from ringray.lab.driver.events import Event, SweepStarted, TrialEnded
from ringray.lab.plan.trial import trial_row
from ringray.lab.trial.outcome import SweepInfo, record_line

_START = b'{"point": '  # the start of each of our lines


class JsonLines:
    """The lines of a sweep in the file or pipe ``name``; - is stdout.

    Raises:
        UserError: it cannot be written.
    """

    def __init__(self, name: str) -> None:
        self._path = Path("/dev/stdout" if name == "-" else name)
        try:
            self._file = output_files.opened(self._path, os.O_APPEND)
        except OSError as error:
            advice = "name a file in a folder that you may write to, or - for stdout"
            why = f"cannot be written: {reason_of(error)}; {advice}"
            raise UserError(f"--json {name}: {why}") from None
        self._sweep: SweepInfo | None = None
        self._pruned: set[str] = set()  # keys of trials whose line the file has

    def take(self, event: Event) -> None:
        """Appends the line of a trial that ended; at the start, those that the file lacks.

        Raises:
            PlaceError: the disk is full; the file is as it was.
        """
        match event:
            case SweepStarted(sweep=sweep, recorded=recorded):
                self._sweep = sweep
                self._pruned = {row.key for row in recorded if row.status == "pruned"}
                if recorded and self._path.is_file() and str(self._path) != "/dev/stdout":
                    there = self._read(sweep.digest)
                    lines = [record_line(sweep, row) for row in recorded if row.status is not None]
                    self._write([line for line in lines if _identity(line) not in there])
            case TrialEnded(trial, outcome) if self._sweep is not None:
                if outcome.status != "pruned" or trial.key not in self._pruned:
                    self._write([record_line(self._sweep, trial_row(trial, outcome))])

    def close(self) -> None:
        os.close(self._file)

    def _read(self, digest: str) -> set[str]:
        """Returns the records of a sweep in the file, and removes an incomplete last line."""
        there, end = set(), 0
        with self._path.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    if line.startswith(_START[: len(line)]):
                        file.truncate(end)
                    else:  # not ours: our first line must not continue it
                        file.seek(0, os.SEEK_END)
                        file.write(b"\n")
                    break
                end += len(line)
                if line.startswith(_START):
                    with suppress(ValueError):
                        record = json.loads(line)
                        if record.get("sweep") == digest:
                            there.add(_identity(record))
        return there

    def _write(self, lines: list[dict[str, Any]]) -> None:
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        before = os.fstat(self._file)
        try:
            output_files.write(self._file, data)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and str(self._path) == "/dev/stdout":
                raise
            advice = "see that something reads it"
            if stat.S_ISREG(before.st_mode):  # removes an incomplete line
                os.ftruncate(self._file, before.st_size)
                advice = "free some space"
            name = self._sweep.name if self._sweep else ""
            again = f"`ringray resume {name} --json {self._path}`"
            advice += f", then {again} writes its line and continues"
            why = f"{reason_of(error)}; the trial is in the store: {advice}"
            raise PlaceError(f"--json {self._path}: {why}") from error


def _identity(line: dict[str, Any]) -> str:
    """Returns a key that differs between any two records."""
    fields = ("point", "config", "status", "reason", "metrics")
    return json.dumps([line.get(name) for name in fields])
