"""Trials on rings that fail or are interrupted; the rings are stand-ins."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from ringray.base import provenance
from ringray.base.errors import StoppedError
from ringray.lab.cluster import connect
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from ringray.lab.cluster.fit import Cluster
from ringray.lab.driver import dispatch, trials
from ringray.lab.driver.resume import Resume
from ringray.lab.driver.run import Sweep, run
from ringray.lab.driver.schedule import Schedule
from ringray.lab.driver.trials import BACKOFF_MOST_S, RetryPolicy, TrialRunner
from ringray.lab.plan import plan
from ringray.lab.ring.monitor import RingFault
from ringray.lab.specs import model as spec
from ringray.lab.store.store import Store
from ringray.lab.trial.faults import Fault
from ringray.lab.trial.outcome import Outcome

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
def made(tmp_path: Path) -> Iterator[tuple[TrialRunner, plan.Plan, Store]]:
    planned = plan.build(spec.parse(TUNE))
    cluster = Cluster(True, Capacity((NodeGroup("node", {"CPU": 2.0}),)))
    with Store(tmp_path / "store.db") as store:
        sweep = Sweep(planned, store, Silent())
        sweep.begin(Resume.of(planned, store, sweep.info.environment), None)
        yield sweep.runner(cluster), planned, store


def test_ctrl_c_waits_for_no_ring_that_starts(
    made: tuple[TrialRunner, plan.Plan, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_test, planned, store = made
    begun = threading.Event()

    class Starting:
        """Takes for ever, if nobody stops it."""

        def __init__(self, capacity: int, placement: Any, timeout: float, patience: Any,
                     avoid: Any) -> None:  # fmt: skip
            begun.set()
            patience.stop.wait()
            raise StoppedError

    monkeypatch.setattr("ringray.lab.ring.pool.ActorRing", Starting)

    def interrupt(*given: Any, **options: Any) -> Any:
        begun.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        under_test.run(Schedule(planned, {}, {}))
    assert {row.status for row in store.trials(planned.digest)} == {None}


def test_what_was_measured_before_gets_no_second_line_on_a_cluster_too_small_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TUNE.replace("kernel-tune", "latency").replace("size: 2,", "size: [2, 4],")
    planned = plan.build(spec.parse(text.partition("search:")[0]))
    small = Cluster(False, Capacity((NodeGroup("node", {"CPU": 2.0}),)))
    left = {trial.config.ring.size: trial for trial in planned.trials}[4]

    class Measured:
        """All but the large ring, on a cluster that had room for it."""

        def __init__(self, *_: Any, record: Any, **others: Any) -> None:
            self.record = record

        def run(self, schedule: Schedule) -> None:
            point = left.point(provenance.describe())
            self.record(left, Outcome("ok", None, {}, {}, point))

        def close(self) -> None:
            pass

    json_path = tmp_path / "a.jsonl"
    described = provenance.describe()
    monkeypatch.setattr(trials, "TrialRunner", Measured)
    monkeypatch.setattr(provenance, "describe", lambda: described)
    with Store(tmp_path / "store.db") as store:
        for offer in (Capacity((NodeGroup("node", {"CPU": 8.0}),)), small.present, small.present):
            place = Cluster(False, offer)
            if offer is small.present:
                monkeypatch.setattr(Measured, "run", lambda self, schedule: None)
            monkeypatch.setattr(connect, "connect", lambda address, at=place: nullcontext(at))
            run(planned, store=store, observer=Silent(), json_path=json_path)
    lines = [json.loads(line) for line in json_path.read_text().splitlines()]
    assert [line["status"] for line in lines if line["config"]["ring_size"] == 4] == ["ok"]


def test_a_late_failure_does_not_take_what_was_measured(
    made: tuple[TrialRunner, plan.Plan, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    under_test, planned, store = made
    schedule = Schedule(planned, {}, {})
    first = schedule.next()
    assert first is not None
    before = Outcome("ok", None, {"median_ms": 3.0, "repeats": 1.0}, {"ms": [3.0]})
    store.record(planned.digest, first.trial.key, before)

    class Broken:
        nodes: tuple[str, ...] = ("a",)

        def settle(self, config: Any, kind: str) -> tuple[Any, dict[str, Any]]:
            return config, {}

        def run(self, kind: str, config: Any, timeout: float, watch: Any = None) -> Any:
            raise RingFault(Fault("rank-died", "gone", (0,)))

    class Rings:
        def take(self, config: Any, ahead: Any) -> tuple[Broken, bool]:
            return Broken(), False

        def close(self, cause: str) -> None:
            pass

    work = first._replace(repeats=2, before=before)
    outcome = under_test._measure(work, schedule, Rings())  # type: ignore[arg-type]
    assert outcome.status == "failed"
    assert (outcome.metrics, outcome.samples) == (before.metrics, before.samples)


@pytest.mark.parametrize("kind", ["node-lost", "rank-died", "stalled", "connection-lost"])
def test_faults_of_the_infrastructure_are_retried_after_pauses_that_grow(kind: Any) -> None:
    pauses = [RetryPolicy(10).pause([Fault(kind)] * attempt) for attempt in range(1, 12)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[BACKOFF_MOST_S] * 4, None]
    assert RetryPolicy(0).pause([Fault(kind)]) is None


def test_preemptions_are_no_attempts() -> None:
    spot = Fault("node-preempted")
    assert RetryPolicy(0).pause([spot] * 5) == 0.5
    assert RetryPolicy(1).pause([spot, Fault("node-lost"), spot]) == 0.5
    assert RetryPolicy(1).pause([Fault("node-lost"), spot, Fault("node-lost")]) is None


def test_other_faults_are_results() -> None:
    assert RetryPolicy(10).pause([Fault("out-of-memory")]) is None
    assert RetryPolicy(10).pause([Fault("error")]) is None
