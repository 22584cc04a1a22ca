"""A sweep as others follow it: its store, and what its driver does now, as a stream of events.

An event is plain JSON with one of these fields. ``sweep`` begins anew, also when another driver
takes the sweep over: its row, then a ``row`` for each of its trials, then ``begin`` (``done``: keys
of trials that need not be measured; ``ago``: seconds since the driver began). Then come ``started``
(a key, with ``attempt`` and ``ago``), ``row`` (a trial that ended), ``note``, and at last ``over``
(the status of the sweep).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from ringray.base.locks import Owner
from ringray.base.redaction import public_spec, shown
from ringray.lab.store import driver_state
from ringray.lab.store.driver_state import DriverState
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import SweepRow, TrialRow

Event = dict[str, Any]
POLL_S = 0.5  # seconds between two looks at the store
_SAMPLES = ("ms", "ratio")  # that an answer is drawn from


class Feed:
    """The events of the sweep ``digest`` in ``store``."""

    def __init__(self, store: Store, digest: str) -> None:
        self._store, self._digest = store, digest
        self._path = driver_state.path_of(store.path, digest)
        self._cursor = self._noted = 0
        self._running: dict[str, tuple[int, float]] = {}

    def events(self, life: float = math.inf) -> Iterator[Event]:
        """Yields events until the sweep is over, or for ``life`` seconds. A sweep whose driver was
        killed is not over: another one may continue it."""
        until = time.monotonic() + life
        driver: Owner | None = None
        begun, alone = False, 0
        while time.monotonic() < until:
            owner = self._store.owner(self._digest)
            state = driver_state.read(self._path, owner.pid) if owner else None
            sweep = self._store.find(self._digest)
            starting = state is not None and state.done is None
            if sweep.status != "running" and not starting:
                if begun:
                    yield from self._changes(state)
                yield from self._whole(sweep, None)
                yield {"over": sweep.status}
                return
            if owner is not None and not starting:
                if not begun or owner != driver:
                    yield from self._whole(sweep, state)
                begun, driver, alone = True, owner, 0
            alone += owner is None
            if alone == 2:  # at the first look it may have been between two
                if not begun:
                    yield from self._whole(sweep, None)
                begun, driver = True, None
                yield {"note": f"its driver was killed; `ringray resume {sweep.name}` continues"}
            if begun:
                yield from self._changes(state)
            time.sleep(POLL_S)

    def _whole(self, sweep: SweepRow, state: DriverState | None) -> Iterator[Event]:
        """Yields all that is known."""
        cores = (sweep.environment.get("hardware") or {}).get("cores", 0)
        bare = replace(sweep, source="", spec=public_spec(sweep.spec))
        yield {"sweep": asdict(bare) | {"environment": {"hardware": {"cores": cores}}}}
        self._cursor = self._store.sequence(self._digest)
        rows = self._store.trials(self._digest)
        yield from map(_row, rows)
        began = state.began if state else sweep.updated
        before = state.done if state else None
        ended = [row for row in rows if row.status is not None]
        if before is not None:  # an older result of what is to be measured again does not count
            ended = [row for row in ended if row.key in before or (row.ended or 0.0) >= began]
        done = [row.key for row in ended]
        yield {"begin": {"done": done, "ago": max(0.0, time.time() - began)}}
        self._noted, self._running = 0, {}

    def _changes(self, state: DriverState | None) -> Iterator[Event]:
        """Yields what came since the last call."""
        changes, self._cursor = self._store.changed_since(self._digest, self._cursor)
        ended = {change.trial.key: change.trial for change in changes}
        running = state.running if state else {}
        for number, text in state.notes if state else ():
            if number > self._noted:
                self._noted = number
                yield {"note": shown(text)}
        for key, (attempt, began) in running.items():
            stale = key in ended and (ended[key].ended or 0.0) >= began
            if not stale and self._running.get(key) != (attempt, began):
                ago = max(0.0, time.time() - began)
                yield {"started": key, "attempt": attempt, "ago": ago}
        self._running = running
        yield from map(_row, ended.values())


def _row(row: TrialRow) -> Event:
    samples = {name: row.samples[name] for name in _SAMPLES if name in row.samples}
    return {"row": asdict(replace(row, samples=samples, environment=None))}
