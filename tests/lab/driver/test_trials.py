"""Which recorded trials stand, and what a fault or a signal costs a trial; rings are stand-ins."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringray.base.errors import StoppedError
from ringray.instruments.progress import Progress
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from ringray.lab.cluster.fit import Cluster
from ringray.lab.driver import dispatch
from ringray.lab.driver.events import Listeners, StepEnded
from ringray.lab.driver.resume import Resume
from ringray.lab.driver.run import Sweep
from ringray.lab.driver.schedule import Schedule
from ringray.lab.driver.trials import BACKOFF_MOST_S, RetryPolicy, TrialRunner
from ringray.lab.plan import plan
from ringray.lab.ring.monitor import RingFault
from ringray.lab.specs import model as spec
from ringray.lab.store.store import Store
from ringray.lab.trial.faults import Fault
from ringray.lab.trial.outcome import NOT_TRIED, Outcome
from tests.support.sweep_world import Heard

SPEC = (
    "version: 1\nname: s\nkind: latency\nring: {size: 2, device: cpu}\n"
    "problem: {seq_len: [64, 128, 192, 256, 320, 384], heads: 2, head_dim: 16}\n"
    "measure: {baseline: null}\nlimits: {retries: 2, rank_memory: 1GiB}\n"
)
TUNE = (
    "version: 1\nname: s\nkind: kernel-tune\nring: {size: 2, device: cpu}\n"
    "problem: {seq_len: 128, heads: 2, head_dim: 16, direction: forward}\n"
    "measure: {repeats: 4, baseline: null}\nlimits: {retries: 0}\n"
    "search: {method: halving, budget: 1}\n"
)
NODE = "ray-id-of-a-node"


class Roomy(Cluster):
    """A cluster on which every ring fits without a node."""

    def fits_without(self, config: Any, without: Any) -> bool:
        return True


def begun(text: str, store: Store, heard: Heard) -> Sweep:
    sweep = Sweep(plan.build(spec.parse(text)), store, Listeners([heard]))
    sweep.begin(Resume.of(sweep.plan, store, sweep.info.environment))
    return sweep


def runner_of(sweep: Sweep) -> TrialRunner:
    cluster = Roomy(True, Capacity((NodeGroup("node", {"CPU": 2.0}),)))
    environment = sweep.info.environment
    return TrialRunner(sweep.plan, cluster, environment, sweep.record, sweep.listeners.tell)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def sweep(tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweep]:
    monkeypatch.setattr("ringray.lab.driver.trials.BACKOFF_S", 0.0)
    with Store(tmp_path / "store.db") as store:
        yield begun(SPEC, store, heard)


# What stands


def test_what_ended_well_with_this_code_stands(sweep: Sweep) -> None:
    environment = sweep.info.environment

    def met(kind: Any, limit: int | None = None) -> dict[str, Any]:
        return {**environment, "faults": [Fault(kind, limit_bytes=limit).as_dict()]}

    trials = sweep.plan.trials
    points = [trial.point(environment) for trial in trials]
    outcomes = (
        (Outcome("ok", point=points[0], environment=met("rank-died")), True),
        (Outcome("ok", point="of-other-code"), False),
        (Outcome("failed", "broken", point=points[2]), False),
        (Outcome("oom", "full", point=points[3], environment=met("out-of-memory", 1 << 30)), True),
        (Outcome("oom", "full", point=points[4], environment=met("out-of-memory", 1 << 20)), False),
        (Outcome("pruned", NOT_TRIED + "no compiler", point=points[5]), True),
    )
    for trial, (outcome, _) in zip(trials, outcomes, strict=True):
        sweep.store.record(sweep.plan.digest, trial.key, outcome)
    resume = Resume.of(sweep.plan, sweep.store, environment)
    assert [trial.key in resume.done for trial in trials] == [stands for _, stands in outcomes]
    assert resume.to_do
    for trial, point in zip(trials, points, strict=True):
        sweep.store.record(sweep.plan.digest, trial.key, Outcome("ok", point=point))
    assert not Resume.of(sweep.plan, sweep.store, environment).to_do


def test_a_measurement_keeps_the_prediction_that_it_was_made_with(sweep: Sweep) -> None:
    environment, (first, second) = sweep.info.environment, sweep.plan.trials[:2]
    outcome = Outcome("ok", metrics={"median_ms": 9.0}, point=first.point(environment))
    sweep.store.record(sweep.plan.digest, first.key, outcome)
    better = first.predicted._replace(time_ms=9.0)
    trials = tuple(replace(trial, predicted=better) for trial in sweep.plan.trials)
    calibrated = replace(sweep.plan, trials=trials)
    for again, time_ms in ((False, first.predicted.time_ms), (True, 9.0)):
        resume = Resume.of(calibrated, sweep.store, environment, again)
        sweep.store.begin(sweep.info, resume.infos())
        rows = {row.key: row for row in sweep.store.trials(calibrated.digest)}
        predicted = [rows[trial.key].predicted["time_ms"] for trial in (first, second)]
        assert predicted == [time_ms, 9.0]


# Faults


class Failing:
    """A ring pool whose rings end with one fault after another."""

    nodes: tuple[str, ...] = ("a",)

    def __init__(self, *met: RingFault) -> None:
        self.met, self.taken, self.closed = list(met), 0, 0

    def take(self, config: Any, ahead: Any) -> Failing:
        self.taken += 1
        return self

    def settle(self, config: Any, kind: str) -> tuple[Any, dict[str, Any]]:
        return config, {}

    def run(self, kind: str, config: Any, timeout: float, watch: Any = None) -> Any:
        raise self.met.pop(0)

    def close(self) -> None:
        self.closed += 1


def measured(sweep: Sweep, rings: Failing) -> tuple[Outcome, TrialRunner]:
    """The outcome of the first trial on ``rings``."""
    runner, schedule = runner_of(sweep), Schedule(sweep.plan, {}, {})
    work = schedule.next()
    return runner._measure(work, schedule, rings), runner  # type: ignore[arg-type]


def died(sound: bool = False) -> RingFault:
    return RingFault(Fault("rank-died", "gone", (0,), node_id=NODE), sound)


def test_a_broken_ring_is_replaced_until_the_limit(sweep: Sweep, heard: Heard) -> None:
    rings = Failing(died(), died(), died(), died())
    outcome, runner = measured(sweep, rings)
    assert (outcome.status, outcome.attempts) == ("failed", 3)
    assert (rings.taken, rings.closed) == (3, 3)
    assert [fault["kind"] for fault in outcome.environment["faults"]] == ["rank-died"] * 3
    assert runner._quarantine.nodes == (NODE,)
    assert heard.names.count("TrialStarted") == 3


def test_a_fault_that_is_a_result_ends_the_trial(sweep: Sweep) -> None:
    rings = Failing(died(), RingFault(Fault("out-of-memory", ranks=(1,)), sound=True))
    outcome, runner = measured(sweep, rings)
    assert (outcome.status, outcome.attempts, rings.taken) == ("oom", 2, 2)
    assert rings.closed == 1, "a sound ring goes on"
    assert runner._quarantine.nodes == ()


def test_a_late_failure_does_not_take_what_was_measured(tmp_path: Path) -> None:
    with Store(tmp_path / "store.db") as store:
        sweep = begun(TUNE, store, Heard())
        schedule = Schedule(sweep.plan, {}, {})
        first = schedule.next()
        before = Outcome("ok", None, {"median_ms": 3.0, "repeats": 1.0}, {"ms": [3.0]})
        work, rings = first._replace(repeats=2, before=before), Failing(died())
        outcome = runner_of(sweep)._measure(work, schedule, rings)  # type: ignore[arg-type]
    assert outcome.status == "failed"
    assert (outcome.metrics, outcome.samples) == (before.metrics, before.samples)


def test_only_faults_of_the_infrastructure_are_retried_after_pauses_that_grow() -> None:
    for kind in ("node-lost", "rank-died", "stalled", "connection-lost"):
        pauses = [RetryPolicy(10).pause([Fault(kind)] * attempt) for attempt in range(1, 12)]
        assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[BACKOFF_MOST_S] * 4, None]
        assert RetryPolicy(0).pause([Fault(kind)]) is None
    spot = Fault("node-preempted")  # which is no attempt
    assert RetryPolicy(0).pause([spot] * 5) == 0.5
    assert RetryPolicy(1).pause([spot, Fault("node-lost"), spot]) == 0.5
    assert RetryPolicy(1).pause([Fault("node-lost"), spot, Fault("node-lost")]) is None
    assert RetryPolicy(10).pause([Fault("out-of-memory")]) is None
    assert RetryPolicy(10).pause([Fault("error")]) is None


def test_ctrl_c_waits_for_no_ring_that_starts(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = threading.Event()

    def start(*arguments: Any) -> Any:
        """Takes for ever, if nobody stops it."""
        starting.set()
        arguments[3].stop.wait()
        raise StoppedError

    def interrupt(*_: Any, **options: Any) -> Any:
        starting.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr("ringray.lab.ring.pool.ActorRing", start)
    monkeypatch.setattr(dispatch, "wait", interrupt)
    with Store(tmp_path / "store.db") as store:
        sweep = begun(TUNE, store, heard)
        with pytest.raises(KeyboardInterrupt):
            runner_of(sweep).run(Schedule(sweep.plan, {}, {}))
        assert {row.status for row in store.trials(sweep.plan.digest)} == {None}


def test_a_running_training_tells_its_steps_and_its_speed(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch, ringray_home: object
) -> None:
    text = "version: 1\nname: t\nkind: train\nring: {size: 2, device: cpu}\n"
    text += "problem: {seq_len: 64, batch: 2}\ntraining: {model: llama-tiny}\n"
    clock = [100.0]
    with Store(tmp_path / "store.db") as store:
        sweep = begun(text, store, heard)
        (trial,) = sweep.plan.runnable
        watch = runner_of(sweep)._watch(trial, 1e9)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for now, step in ((100.0, 3), (104.0, 5), (107.0, 5)):  # told twice
        clock[0] = now
        watch(Progress(told=(step, {"loss": 1.0})))
    first, second = (event for event in heard.events if isinstance(event, StepEnded))
    assert (first.step, first.values, first.metrics) == (3, {"loss": 1.0}, {})
    assert second.metrics["median_ms"] == pytest.approx(2000.0)
    assert second.metrics["tokens_per_s"] == pytest.approx(2 * 64 / 2.0)
    assert second.metrics["mfu"] == pytest.approx(trial.predicted.flops / 2.0 / 1e9)
