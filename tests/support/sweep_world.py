"""A checkout, a machine and a store on which sweeps run, on rings that measure in no time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ringray.base import provenance
from ringray.lab.cluster import connect
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from ringray.lab.cluster.fit import Cluster
from ringray.lab.driver import trials
from ringray.lab.driver.events import Event, Listener, Note, Summary, TrialStarted
from ringray.lab.driver.run import run
from ringray.lab.driver.schedule import Schedule
from ringray.lab.plan import plan
from ringray.lab.plan.trial import Trial
from ringray.lab.specs import model as spec
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome

THREE = (
    "version: 1\nname: s\nkind: latency\nring: {size: 2, device: cpu}\n"
    "problem: {seq_len: [64, 128, 192], heads: 2, head_dim: 16}\n"
    "measure: {repeats: 1, baseline: null}\ntracking: {enabled: false}\n"
)


def machine(cpus: float = 2.0) -> Cluster:
    return Cluster(False, Capacity((NodeGroup("node", {"CPU": cpus}),)))


class Heard:
    """A listener that keeps its events, and raises what is due at one of a type."""

    def __init__(self, at: type | None = None, error: Exception | None = None) -> None:
        self.events: list[Event] = []
        self.closed = 0
        self._at, self._error = at, error

    def take(self, event: Event) -> None:
        self.events.append(event)
        if self._error and self._at and isinstance(event, self._at):
            raise self._error

    def close(self) -> None:
        self.closed += 1

    @property
    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Note)]


class Rings:
    """A trial runner; each measurement takes a millisecond longer than the one before, on a ring
    that takes ``took_s`` for a trial."""

    count = 0
    most = 10**9
    took_s = 0.5

    def __init__(
        self,
        made: plan.Plan,
        cluster: Cluster,
        environment: dict[str, Any],
        record: Callable[[Trial, Outcome], None],
        tell: Callable[[Event], None],
    ) -> None:
        self.environment, self.record, self.tell = environment, record, tell

    def run(self, schedule: Schedule) -> None:
        while (work := schedule.next()) is not None:
            if Rings.count == Rings.most:
                raise KeyboardInterrupt
            self.tell(TrialStarted(work.trial, 1))
            Rings.count += 1
            point = work.trial.point(self.environment)
            ms, now = float(Rings.count), 1e9 + Rings.count
            samples, end = {"ms": [ms] * work.repeats}, now + Rings.took_s
            outcome = Outcome("ok", None, {"median_ms": ms}, samples, point, 1, now, end)
            self.record(work.trial, outcome)
            schedule.tell(work, outcome)

    def close(self) -> None:
        """Has nothing to close."""


def stand_in(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> list[str | None]:
    """Lets all sweeps be measured by ``Rings``; returns the addresses that they connect to."""
    addresses: list[str | None] = []

    def connected(address: str | None) -> Any:
        addresses.append(address)
        return nullcontext(cluster)

    monkeypatch.setattr(connect, "connect", connected)
    monkeypatch.setattr(trials, "TrialRunner", Rings)
    for name, value in (("count", 0), ("most", 10**9), ("took_s", 0.5)):
        monkeypatch.setattr(Rings, name, value)
    return addresses


class World:
    """A sweep of three trials that runs again and again."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = THREE, cpus: float = 2.0
    ) -> None:
        self.folder, self.path = folder, folder / "store.db"
        self.plan = plan.build(spec.parse(text))
        self.here = copy.deepcopy(provenance.describe())
        self.cluster = machine(cpus)
        self.checkout("a")
        monkeypatch.setattr(provenance, "describe", lambda: copy.deepcopy(self.here))
        stand_in(monkeypatch, self.cluster)

    def checkout(self, code: str) -> None:
        self.here |= {"kernels": code * 64, "git": {"commit": code * 40, "dirty": False}}

    def run(self, *listeners: Listener, again: bool = False) -> tuple[Summary, list[str]]:
        heard = Heard()
        with Store(self.path) as store:
            listeners = (heard, *listeners)
            summary = run(self.plan, store=store, listeners=listeners, again=again)
        return summary, [note for note in heard.notes if "connecting" not in note]

    def medians(self) -> list[float]:
        with Store(self.path) as store:
            return [row.metrics["median_ms"] for row in store.trials(self.plan.digest)]

    def earlier(self) -> list[float]:
        with Store(self.path) as store:
            rows = [recording.trial for recording in store.history(self.plan.digest)]
        return sorted(row.metrics["median_ms"] for row in rows)
