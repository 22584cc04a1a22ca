"""The present work of a sweep's driver, for other processes: a small file beside the store.

It is no record, and may be missing or old: a full disk keeps it from being written, and a killed
driver leaves it. A reader takes it from a driver that lives, and ended trials from the store.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from ringray.base import private_files

_MOST = 1 << 24  # bytes of the file that are read


@dataclass
class DriverState:
    """The work of a driver at one moment."""

    pid: int
    began: float  # Unix time in seconds
    done: list[str] | None = None  # keys of trials that it need not measure, None until known
    #: Attempt, and Unix time of its begin, by trial key.
    running: dict[str, tuple[int, float]] = field(default_factory=dict)
    notes: list[tuple[int, str]] = field(default_factory=list)  # the latest; numbers begin at 1


_FORM = TypeAdapter(DriverState)


def path_of(store: Path, digest: str) -> Path:
    """Returns the file of a sweep, beside its lease."""
    store = store.resolve()
    return store.with_name(f".{store.name}.{digest[:12]}.driver.json")


def write(path: Path, state: DriverState) -> None:
    """Replaces the file; does nothing if that fails."""
    with suppress(OSError):
        private_files.write(path, json.dumps(asdict(state)))


def read(path: Path, pid: int) -> DriverState | None:
    """Returns what the driver ``pid`` wrote; None if there is nothing of it."""
    with suppress(OSError, ValueError), private_files.regular(path) as file:
        state = _FORM.validate_json(file.read(_MOST))
        if state.pid == pid:
            return state
    return None
