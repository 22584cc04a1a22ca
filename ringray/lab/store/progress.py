"""The curves of running trainings on their way to MLflow: lines in a file beside the store.

They are no record: when a trial ends, its samples in the store have the whole curves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ringray.base import private_files
from ringray.lab.trial.outcome import part_of_a_path


class CurvePoint(NamedTuple):
    """The value of a curve at a step, from 1, of a trial, from 0."""

    trial: int
    name: str
    step: int
    value: float


def path_of(sweep: str) -> Path:
    """Returns the file of a sweep; ``sweep`` is its digest."""
    folder = private_files.home() / "artifacts" / "progress"
    return folder / f"{part_of_a_path(sweep)[:12]}.jsonl"


def clear(sweep: str) -> None:
    """Forgets what a run of the sweep has told."""
    with suppress(OSError):
        path_of(sweep).unlink(missing_ok=True)


def tell(path: Path, trial: int, step: int, values: Mapping[str, float]) -> None:
    """Adds the values of a step; OSError if that fails."""
    private_files.folder(path.parent.parent)
    private_files.folder(path.parent)
    lines = [json.dumps([trial, name, step, value]) + "\n" for name, value in values.items()]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def told(path: Path, offset: int) -> tuple[list[CurvePoint], int]:
    """Returns what was told behind ``offset`` bytes, and where that ends."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            whole = file.read().rpartition(b"\n")[0]  # the last line may be half written
    except OSError:  # there is none, or it is being removed
        return [], 0
    points = []
    for line in whole.splitlines():
        with suppress(ValueError):  # a line that a full disk cut short
            points.append(CurvePoint(*json.loads(line)))
    return points, offset + len(whole) + bool(whole)
