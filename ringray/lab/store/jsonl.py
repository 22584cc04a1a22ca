"""Reads the lines of ``--json``."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from pydantic import TypeAdapter

from ringray.base import provenance
from ringray.base.errors import UserError, reason_of
from ringray.lab.trial.outcome import SweepInfo, TrialRow

_ROW = TypeAdapter(TrialRow)


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
