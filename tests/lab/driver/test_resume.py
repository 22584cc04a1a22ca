"""Which recorded trials stand when a sweep is continued, and what a fault costs a trial."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from ringray.lab.cluster.fit import Cluster
from ringray.lab.driver.resume import Resume
from ringray.lab.driver.run import Sweep
from ringray.lab.driver.schedule import Schedule
from ringray.lab.driver.trials import TrialRunner
from ringray.lab.plan import plan
from ringray.lab.ring.monitor import RingFault
from ringray.lab.specs import model as spec
from ringray.lab.store.store import Store
from ringray.lab.trial.faults import Fault
from ringray.lab.trial.outcome import NOT_TRIED, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPEC = (
    "version: 1\nname: s\nkind: latency\nring: {size: 2, device: cpu}\n"
    "problem: {seq_len: [64, 128, 192, 256, 320, 384], heads: 2, head_dim: 16}\n"
    "measure: {baseline: null}\nlimits: {retries: 2, rank_memory: 1GiB}\n"
)
NODE = "ray-id-of-a-node"


class Silent:
    """An observer that ignores everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Sweep]:
    """A sweep that has begun, with a ``--json`` file."""
    planned = plan.build(spec.parse(SPEC))
    with Store(tmp_path / "store.db") as store:
        made = Sweep(planned, store, Silent(), tmp_path / "a.jsonl")
        made.begin(Resume.of(planned, store, made.info.environment), None)
        yield made


def test_what_ended_well_with_this_code_stands(sweep: Sweep) -> None:
    environment = sweep.info.environment

    def lack(limit: int) -> dict[str, Any]:
        fault = Fault("out-of-memory", limit_bytes=limit).as_dict()
        return {**environment, "faults": [fault]}

    trials = sweep.plan.trials
    points = [trial.point(environment) for trial in trials]
    outcomes = (
        (Outcome("ok", point=points[0]), True),
        (Outcome("ok", point="of-other-code"), False),
        (Outcome("failed", "broken", point=points[2]), False),
        (Outcome("oom", "full", point=points[3], environment=lack(1 << 30)), True),
        (Outcome("oom", "full", point=points[4], environment=lack(1 << 20)), False),
        (Outcome("pruned", NOT_TRIED + "no compiler", point=points[5]), True),
    )
    for trial, (outcome, _) in zip(trials, outcomes, strict=True):
        sweep.store.record(sweep.plan.digest, trial.key, outcome)
    resume = Resume.of(sweep.plan, sweep.store, environment)
    assert [trial.key in resume.done for trial in trials] == [stands for _, stands in outcomes]
    assert resume.to_do


def test_a_measurement_keeps_the_prediction_that_it_was_made_with(sweep: Sweep) -> None:
    environment, (first, second) = sweep.info.environment, sweep.plan.trials[:2]
    outcome = Outcome("ok", metrics={"median_ms": 9.0}, point=first.point(environment))
    sweep.store.record(sweep.plan.digest, first.key, outcome)
    assert first.predicted is not None
    better = first.predicted._replace(time_ms=9.0)
    trials = tuple(replace(one, predicted=better) for one in sweep.plan.trials)
    calibrated = replace(sweep.plan, trials=trials)

    def predicted(*, again: bool) -> list[float]:
        resume = Resume.of(calibrated, sweep.store, environment, again)
        sweep.store.begin(sweep.info, resume.infos())
        rows = {row.key: row for row in sweep.store.trials(calibrated.digest)}
        return [rows[one.key].predicted["time_ms"] for one in (first, second)]

    assert predicted(again=False) == [first.predicted.time_ms, 9.0]
    assert predicted(again=True) == [9.0, 9.0]


def test_nothing_is_left_to_do_when_all_stand(sweep: Sweep) -> None:
    environment = sweep.info.environment
    for trial in sweep.plan.trials:
        outcome = Outcome("ok", point=trial.point(environment))
        sweep.store.record(sweep.plan.digest, trial.key, outcome)
    assert not Resume.of(sweep.plan, sweep.store, environment).to_do


def test_a_sweep_that_cannot_be_tracked_is_forgotten_if_it_is_new(tmp_path: Path) -> None:
    def unreachable() -> Any:
        raise PlaceError("no MLflow server answers")

    with Store(tmp_path / "store.db") as store:
        made = Sweep(plan.build(spec.parse(SPEC)), store, Silent())
        resume = Resume.of(made.plan, store, made.info.environment)
        with pytest.raises(PlaceError, match="no MLflow"):
            made.begin(resume, unreachable)
        assert store.sweeps() == []
        made.begin(resume, None)
        with pytest.raises(PlaceError, match="no MLflow"):
            made.begin(resume, unreachable)
        assert [row.digest for row in store.sweeps()] == [made.plan.digest]


def test_a_line_is_written_only_of_what_the_store_holds(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise PlaceError("no space")

    monkeypatch.setattr(sweep.store, "record", full)
    with pytest.raises(PlaceError, match="no space"):
        sweep.record(sweep.plan.trials[0], Outcome("ok"))
    assert (tmp_path / "a.jsonl").read_text() == ""


class Failing:
    """A ring pool whose rings end with one fault after another."""

    nodes: tuple[str, ...] = ("a",)

    def __init__(self, *met: RingFault) -> None:
        self.met, self.taken, self.closed = list(met), 0, 0

    def take(self, config: Any, ahead: Any) -> tuple[Failing, bool]:
        self.taken += 1
        return self, False

    def settle(self, config: Any, kind: str) -> tuple[Any, dict[str, Any]]:
        return config, {}

    def run(self, kind: str, config: Any, timeout: float, watch: Any = None) -> Any:
        raise self.met.pop(0)

    def close(self, cause: str) -> None:
        self.closed += 1


class Roomy(Cluster):
    """A cluster on which every ring fits without a node."""

    def fits_without(self, config: Any, without: Any) -> bool:
        return True


def measured(sweep: Sweep, rings: Failing) -> tuple[Outcome, TrialRunner]:
    """The outcome of the first trial on ``rings``."""
    node = NodeGroup("node", {"CPU": 2.0})
    runner, schedule = (
        sweep.runner(Roomy(True, Capacity((node,)))),
        Schedule(sweep.plan, {}, {}),
    )
    work = schedule.next()
    assert work is not None
    return runner._measure(work, schedule, rings), runner  # type: ignore[arg-type]


def died(sound: bool = False) -> RingFault:
    return RingFault(Fault("rank-died", "gone", (0,), node_id=NODE), sound)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringray.lab.driver.trials.BACKOFF_S", 0.0)


def test_a_broken_ring_is_replaced_until_the_limit(sweep: Sweep) -> None:
    rings = Failing(died(), died(), died(), died())
    outcome, runner = measured(sweep, rings)
    assert (outcome.status, outcome.attempts) == ("failed", 3)
    assert (rings.taken, rings.closed) == (3, 3)
    assert outcome.environment is not None
    assert [fault["kind"] for fault in outcome.environment["faults"]] == ["rank-died"] * 3
    assert runner._quarantine.nodes == (NODE,)


def test_a_fault_that_is_a_result_ends_the_trial(sweep: Sweep) -> None:
    rings = Failing(died(), RingFault(Fault("out-of-memory", ranks=(1,)), sound=True))
    outcome, runner = measured(sweep, rings)
    assert (outcome.status, outcome.attempts, rings.taken) == ("oom", 2, 2)
    assert rings.closed == 1, "a sound ring goes on"
    assert runner._quarantine.nodes == ()
