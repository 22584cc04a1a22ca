"""``--json``: one line per trial, appended as trials end.

The store is written first. What a line lacks because its driver was killed in between, or had no
room for it, is written when the sweep is continued with the same file.
"""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

from ringray.base.errors import PlaceError, UserError
from ringray.lab.trial.outcome import record_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ringray.lab.trial.outcome import SweepInfo, TrialRow

_START = b'{"point": '  # how each line of ours begins


class Lines:
    """Appends to ``path``; without one, to nothing.

    Raises:
        UserError: ``path`` cannot be written.
    """

    def __init__(self, path: Path | None, sweep: SweepInfo) -> None:
        self._path, self._sweep = path, sweep
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise UserError(
                f"--json {path}: {error.strerror}; name a file that can be written"
            ) from None

    def append(self, row: TrialRow) -> None:
        """Appends one ended trial.

        Raises:
            PlaceError: there is no room for it; the file is as it was.
        """
        self._write([record_line(self._sweep, row)])

    def catch_up(self, rows: Iterable[TrialRow]) -> None:
        """Of the trials that ended before, in this order, those that the file lacks; a last line
        that was cut off is taken back first. A pipe or a terminal gets nothing of that.

        Raises:
            PlaceError: as above, or the file cannot be read.
        """
        if self._path is None or str(self._path) == "/dev/stdout" or not self._path.is_file():
            return
        try:
            there = self._read()
        except OSError as error:
            raise PlaceError(f"--json {self._path}: {error.strerror}") from error
        lines = [record_line(self._sweep, row) for row in rows if row.status is not None]
        self._write([line for line in lines if _identity(line) not in there])

    def _read(self) -> set[str]:
        """The records of this sweep that the file holds."""
        assert self._path is not None
        found, end = set(), 0
        with self._path.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    if line.startswith(_START[: len(line)]):
                        file.truncate(end)
                    else:  # not ours; it only must not run into what is ours
                        file.seek(0, os.SEEK_END)
                        file.write(b"\n")
                    break
                end += len(line)
                if line.startswith(_START) and self._sweep.digest.encode() in line:
                    try:
                        record = json.loads(line)
                    except ValueError:
                        continue
                    if record.get("sweep") == self._sweep.digest:
                        found.add(_identity(record))
        return found

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._path is None or not lines:
            return
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            before = os.fstat(file)
            try:
                while data:
                    data = data[os.write(file, data) :]
            except BrokenPipeError:
                raise
            except OSError as error:
                if stat.S_ISREG(before.st_mode):  # no half a line
                    os.ftruncate(file, before.st_size)
                raise PlaceError(
                    f"--json {self._path}: {(error.strerror or str(error)).lower()}; the trial is "
                    f"in the store: free some space, then `ringray resume {self._sweep.name} "
                    f"--json {self._path}` writes its line and continues"
                ) from error
        finally:
            os.close(file)


def _identity(line: dict[str, Any]) -> str:
    """What tells one recording of a trial from all others."""
    return json.dumps([line.get(name) for name in ("config", "status", "reason", "metrics")])
