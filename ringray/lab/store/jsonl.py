"""``--json``: one line per trial, appended as trials end.

The store is written first. A line that is missing because its driver was killed in between, or the
disk was full, is written when the sweep is continued with the same file.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ringray.base import output_files, provenance
from ringray.base.errors import PlaceError, UserError, reason_of
from ringray.lab.trial.outcome import SweepInfo, TrialRow, record_line

_ROW = TypeAdapter(TrialRow)
_START = b'{"point": '  # the start of each of our lines


def read(path: Path) -> list[tuple[SweepInfo, TrialRow]]:
    """Reads the lines of ``--json``; the spec of a sweep, its kind and its text are not in them.

    Raises:
        UserError: the file cannot be read, or a line is none of ours; the message has its number.
    """
    records = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    records.append(_parsed(line, f"{path}:{number}"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {reason_of(error)}") from error
    return records


def _parsed(line: bytes, place: str) -> tuple[SweepInfo, TrialRow]:
    try:
        record = json.loads(line)
        when = record.get("time")  # not in lines of format 1
        ended = datetime.fromisoformat(when).timestamp() if when else None
        where = record["environment"]
        metrics = {name: number for name, number in record["metrics"].items() if number is not None}
        samples = dict(record.get("samples", {}))
        for name, values in samples.items():
            samples[name] = [number for number in values if number is not None]
        plan = record["point"] or "", 0, record["config"], record.get("predicted", {})
        status, reason, point = record["status"], record["reason"], record["point"]
        row = TrialRow(*plan, status, reason, metrics, samples, point, 1, ended, ended, where)
        digest, name = record["sweep"], record.get("name", "")
        _ROW.validate_json(json.dumps(asdict(row)), strict=True)
        if not (isinstance(digest, str) and isinstance(name, str)):
            raise ValueError
        if type(row.config.get("replica", 0)) is not int:
            raise ValueError
        provenance.measured_parts(where), provenance.commit(where)  # raise if it is another thing
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{place}: not a line of `ringray run --json`; remove the line, or write the file anew "
            "with `ringray status SWEEP --json FILE`"
        ) from None
    return SweepInfo(digest, name, "", {}, "", where), row


class Lines:
    """The lines of a sweep in the file ``path``; without a path, all calls do nothing.

    Raises:
        UserError: ``path`` cannot be written.
    """

    def __init__(self, path: Path | None, sweep: SweepInfo) -> None:
        self._path, self._sweep = path, sweep
        self._pipe: int | None = None  # stays open: its reader ends with its last writer
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = output_files.opened(path, os.O_APPEND)
        except OSError as error:
            why = f"{reason_of(error)}; name a file that can be written"
            raise UserError(f"--json {path}: {why}") from None
        if path.is_fifo():
            self._pipe = file
        else:
            os.close(file)

    def append(self, row: TrialRow) -> None:
        """Appends one ended trial.

        Raises:
            PlaceError: the disk is full; the file is as it was.
        """
        self._write([record_line(self._sweep, row)])

    def catch_up(self, rows: Iterable[TrialRow]) -> None:
        """Appends the ended trials of ``rows`` that the file lacks, and first removes an incomplete
        last line. Does nothing for a pipe or a terminal.

        Raises:
            PlaceError: as above, or the file cannot be read.
        """
        if self._path is None or str(self._path) == "/dev/stdout" or not self._path.is_file():
            return
        try:
            there = self._read()
        except OSError as error:
            raise PlaceError(f"--json {self._path}: {reason_of(error)}") from error
        lines = [record_line(self._sweep, row) for row in rows if row.status is not None]
        self._write([line for line in lines if _identity(line) not in there])

    def _read(self) -> set[str]:
        """Returns the records of this sweep in the file."""
        assert self._path is not None
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
                if line.startswith(_START) and self._sweep.digest.encode() in line:
                    try:
                        record = json.loads(line)
                    except ValueError:
                        continue
                    if record.get("sweep") == self._sweep.digest:
                        there.add(_identity(record))
        return there

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._path is None or not lines:
            return
        data = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = self._pipe or output_files.opened(self._path, os.O_APPEND)
        try:
            before = os.fstat(file)
            try:
                output_files.write(file, data)
            except OSError as error:
                if isinstance(error, BrokenPipeError) and self._pipe is None:
                    raise
                advice = "see that something reads it"
                if stat.S_ISREG(before.st_mode):  # removes an incomplete line
                    os.ftruncate(file, before.st_size)
                    advice = "free some space"
                again = f"`ringray resume {self._sweep.name} --json {self._path}`"
                advice += f", then {again} writes its line and continues"
                why = f"{reason_of(error)}; the trial is in the store: {advice}"
                raise PlaceError(f"--json {self._path}: {why}") from error
        finally:
            if file != self._pipe:
                os.close(file)


def _identity(line: dict[str, Any]) -> str:
    """Returns a key that differs between any two records."""
    fields = ("point", "config", "status", "reason", "metrics")
    return json.dumps([line.get(name) for name in fields])
