"""A sweep as others follow it: the log of its driver, and before and after it the store.

A driver appends its events to a file beside the store, one JSON object a line; the next driver of
the sweep begins a new file. The fields of a line: ``driver`` (its pid, in the first line),
``begin`` (Unix time; ``done``: keys of trials that need not be measured), ``started`` (a key, with
``attempt`` and ``at``), ``ended`` (a key, with its ``outcome``), ``note``, ``curve`` (the index of
a trial, with ``step`` and ``values`` of a running training).

A feed yields the same, for readers who have no store: before ``begin`` come ``sweep`` (its row) and
a ``row`` for each of its trials, times are ``ago`` in seconds, and the last event is ``over`` (the
status of the sweep).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from ringray.base import private_files
from ringray.base.locks import Owner
from ringray.base.redaction import public_spec, shown
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import SweepRow

Line = dict[str, Any]
POLL_S = 0.5  # seconds between two looks
_SAMPLES = ("ms", "ratio")  # that an answer is drawn from


def path_of(store: Path, digest: str) -> Path:
    """Returns the log of a sweep's driver, beside its lease."""
    store = store.resolve()
    return store.with_name(f".{store.name}.{digest[:12]}.events.jsonl")


def drawn(samples: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Returns the samples that a view needs, without curves."""
    return {name: samples[name] for name in _SAMPLES if name in samples}


class CurvePoint(NamedTuple):
    """The value of a curve at a step, from 1, of a trial, from 0."""

    trial: int
    name: str
    step: int
    value: float


class LogReader:
    """The log of the driver ``pid``, read as it grows; None: of any driver."""

    def __init__(self, path: Path, pid: int | None = None) -> None:
        self._path, self._pid = path, pid
        self._file: BufferedReader | None = None
        self._rest = b""

    def lines(self) -> Iterator[Line]:
        """Yields the lines that came since the last call."""
        if self._file is None:
            with suppress(OSError):
                self._file = private_files.regular(self._path)
        data = self._rest + (self._file.read() if self._file else b"")
        *whole, self._rest = data.split(b"\n")
        for text in whole:
            with suppress(ValueError):  # empty, or cut short by a full disk
                line = json.loads(text)
                if self._pid is not None and line.get("driver", self._pid) != self._pid:
                    self._file, self._rest = None, b""  # left by a killed driver
                    return
                yield line

    def curve_points(self) -> list[CurvePoint]:
        """Returns what running trainings told since the last call."""
        return [
            CurvePoint(line["curve"], name, line["step"], value)
            for line in self.lines()
            if "curve" in line
            for name, value in line["values"].items()
        ]


class Feed:
    """The events of the sweep ``digest`` in ``store``."""

    def __init__(self, store: Store, digest: str) -> None:
        self._store, self._digest = store, digest
        self._ended: dict[str, float] = {}  # Unix times by key, of what was told as rows

    def events(self, life: float = math.inf) -> Iterator[Line]:
        """Yields events until the sweep is over, or for ``life`` seconds. A sweep whose driver was
        killed is not over: another one may continue it."""
        until = time.monotonic() + life
        path = path_of(self._store.path, self._digest)
        driver: Owner | None = None
        log, begun, alone = LogReader(path, 0), False, 0
        while time.monotonic() < until:
            owner = self._store.owner(self._digest)
            sweep = self._store.find(self._digest)
            if owner is not None and owner != driver:
                driver, log, begun = owner, LogReader(path, owner.pid), False
            for line in log.lines():
                begun = begun or "begin" in line
                yield from self._events(line)
            # A driver that continues a sweep has not begun it before it has connected to Ray.
            if sweep.status != "running" and (begun or owner is None):
                yield from self._rows(self._store.find(self._digest))
                yield {"over": sweep.status}
                return
            alone = alone + 1 if owner is None else 0
            if alone == 2:  # at the first look it may have been between two
                if not begun:
                    yield from self._rows(sweep)
                    done = [key for key, ended in self._ended.items() if ended]
                    yield _begin(done, sweep.updated)
                yield {"note": f"its driver was killed; `ringray resume {sweep.name}` continues"}
            time.sleep(POLL_S)

    def _rows(self, sweep: SweepRow) -> Iterator[Line]:
        """Yields what the store has."""
        cores = (sweep.environment.get("hardware") or {}).get("cores", 0)
        bare = replace(sweep, source="", spec=public_spec(sweep.spec))
        yield {"sweep": asdict(bare) | {"environment": {"hardware": {"cores": cores}}}}
        rows = self._store.trials(self._digest)
        self._ended = {row.key: row.ended or 0.0 for row in rows}
        for row in rows:
            yield {"row": asdict(replace(row, samples=drawn(row.samples), environment=None))}

    def _events(self, line: Line) -> Iterator[Line]:
        """Yields a line of the log, but not what the rows have told already."""
        match line:
            case {"begin": float(began), "done": list(done)}:
                yield from self._rows(self._store.find(self._digest))
                done += [key for key, ended in self._ended.items() if ended >= began]
                yield _begin(list(dict.fromkeys(done)), began)
            case {"started": str(key), "attempt": attempt, "at": float(at)}:
                if at > self._ended.get(key, 0.0):
                    yield {"started": key, "attempt": attempt, "ago": max(0.0, time.time() - at)}
            case {"ended": str(key), "outcome": {"ended": float(at)}}:
                if not at or at > self._ended.get(key, 0.0):  # pruned points have no time
                    yield line
            case {"note": str(text)}:
                yield {"note": shown(text)}


def _begin(done: list[str], began: float) -> Line:
    return {"begin": {"done": done, "ago": max(0.0, time.time() - began)}}
