"""What a session makes of rings that fail or are interrupted; with rings that only say so."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ringray import plan, session, spec
from ringray.autotune.schedule import Schedule
from ringray.cluster import Cluster
from ringray.errors import StoppedError
from ringray.faults import Fault
from ringray.lines import Lines
from ringray.observer import Summary
from ringray.offer import Group, Offer
from ringray.records import SweepInfo
from ringray.session import Session
from ringray.store import Store
from ringray.vigil import RingFault

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TUNE = (
    "version: 1\nname: s\nkind: kernel-tune\nring: {size: 2, device: cpu}\n"
    "problem: {seq_len: 128, heads: 2, head_dim: 16, direction: forward}\n"
    "measure: {repeats: 4, baseline: null}\nlimits: {retries: 0}\n"
    "search: {method: halving, budget: 1}\n"
)


class Silent:
    """An observer to whom nothing matters."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Session, plan.Plan, Store]]:
    planned = plan.build(spec.parse(TUNE))
    described = {"code": "c"}
    sweep = SweepInfo(planned.digest, "s", "kernel-tune", {}, "", described)
    place = Cluster(True, Offer((Group("node", {"CPU": 2.0}),)))
    with Store(tmp_path / "store.db") as store:
        from ringray.driver import _info

        store.begin(sweep, [_info(trial, {}) for trial in planned.trials])
        summary = Summary(planned.digest, "s")
        yield (
            Session(planned, store, Silent(), place, sweep, Lines(None, sweep), summary),
            planned, store,
        )  # fmt: skip


def test_ctrl_c_waits_for_no_ring_that_starts(
    made: tuple[Session, plan.Plan, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_test, planned, store = made
    begun = threading.Event()

    class Starting:
        """Takes as long as its patience, if nobody stops it."""

        def __init__(self, capacity: int, placement: Any, timeout: float, patience: Any,
                     avoid: Any) -> None:  # fmt: skip
            begun.set()
            if patience.stop.wait(60):
                raise StoppedError

    monkeypatch.setattr("ringray.warm.Ring", Starting)

    def interrupt(*given: Any, **options: Any) -> Any:
        begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "wait", interrupt)
    since = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        under_test.run(Schedule(planned, {}, {}))
    assert time.monotonic() - since < 30  # and not its minute
    assert {row.status for row in store.trials(planned.digest)} == {None}


def test_a_late_failure_does_not_take_what_was_measured(
    made: tuple[Session, plan.Plan, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_test, planned, store = made
    schedule = Schedule(planned, {}, {})
    first = schedule.next()
    assert first is not None
    from ringray.records import Outcome

    before = Outcome("ok", None, {"median_ms": 3.0, "repeats": 1.0}, {"ms": [3.0]})
    store.record(planned.digest, first.trial.key, before)

    class Broken:
        nodes: frozenset[str] = frozenset()

        def settle(self, config: Any, kind: str) -> tuple[Any, dict[str, Any]]:
            return config, {}

        def run(self, kind: str, config: Any, timeout: float) -> Any:
            raise RingFault(Fault("rank-died", "gone", (0,)))

    class Rings:
        def take(self, config: Any, ahead: Any) -> tuple[Broken, bool]:
            return Broken(), False

        def close(self) -> None:
            pass

    work = first._replace(repeats=2, before=before)
    outcome = under_test._measure(work, schedule, Rings())  # type: ignore[arg-type]
    assert outcome.status == "failed"
    assert (outcome.metrics, outcome.samples) == (before.metrics, before.samples)
