"""A plan under a search: what is handed out, what the store saves, what is found."""

from __future__ import annotations

import random

import pytest

from ringray.lab.driver.schedule import Schedule, Work
from ringray.lab.driver.studies import StudyResult, outcome_of
from ringray.lab.plan import plan
from ringray.lab.specs import model as spec
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.outcome import Outcome, TrialRow

HEAD = "version: 1\nname: s\nkind: strategy-tune\n"
BODY = (
    "ring: {size: [2, 4]}\nproblem: {seq_len: 4096, direction: forward}\n"
    "strategy: {partition: auto, transport: auto}\nmeasure: {repeats: 9}\n"
)
ALL = ["grid", "random", "halving", "optuna"]
METHODS = ["grid", "halving"]


def build(search: str, body: str = BODY) -> plan.Plan:
    return plan.build(spec.parse(f"{HEAD}{body}search: {search}\n", "s.yaml"))


class Machine:
    """Times by partition and transport; broken trials fail."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.draw = random.Random(3)
        self.worked: list[Work] = []

    def cost(self, config: TrialConfig) -> float:
        names = ("zigzag", "contiguous", "striped", "zigzag-token")
        return 10 + 3 * names.index(config.strategy.partition) + len(config.strategy.transport)

    def outcome(self, work: Work) -> Outcome:
        self.worked.append(work)
        config = work.trial.config
        if self.broken and config.strategy.transport.startswith(self.broken):
            return Outcome("failed", "broken")
        assert work.config.measure.repeats >= 1
        before = list(work.before.samples["ms"]) if work.before else []
        cost = self.cost(config)
        ms = before + [
            cost * (1 + self.draw.gauss(0, 0.01)) for _ in range(work.config.measure.repeats)
        ]
        assert len(ms) == work.repeats
        median = sorted(ms)[len(ms) // 2]
        metrics = {"median_ms": median, "tflops": 1 / median, "peak_memory_bytes": 1e9 / cost}
        return Outcome("ok", None, metrics, {"ms": ms})

    def run(self, schedule: Schedule, stop: int | None = None) -> dict[str, Outcome]:
        done: dict[str, Outcome] = {}
        while (stop is None or len(self.worked) < stop) and (work := schedule.next()) is not None:
            done[work.trial.key] = self.outcome(work)
            schedule.tell(work, done[work.trial.key])
        return done


def as_rows(done: dict[str, Outcome]) -> dict[str, TrialRow]:
    return done  # type: ignore[return-value]  # status, metrics and samples are all that is read


@pytest.mark.parametrize("method", METHODS)
def test_it_finds_the_best_of_each(method: str) -> None:
    budget = "" if method == "grid" else ", budget: 0.5"
    made, machine = build(f"{{method: {method}{budget}}}"), Machine()
    schedule = Schedule(made, {}, {})
    machine.run(schedule)
    found = schedule.found()
    assert len(found) == 2
    for study in found:
        trials = {trial.key: trial for trial in study.trials}
        least = min(machine.cost(trial.config) for trial in study.trials)
        assert machine.cost(trials[study.best].config) <= 1.05 * least
        assert study.runs <= 0.5 * 9 * len(study.trials) or method == "grid"


@pytest.mark.parametrize("method", ALL)
def test_what_the_store_holds_is_not_measured_again(method: str) -> None:
    made = build(f"{{method: {method}}}")
    whole = Machine()
    done = whole.run(Schedule(made, {}, {}))
    left = {t.key for t in made.runnable} - set(done)
    again = Schedule(made, {}, as_rows(done))
    assert again.next() is None
    assert {trial.key for trial in again.not_requested()} == left
    assert again.not_requested() == []
    # Nor where it would be asked for something else today.
    for result in done.values():
        result.metrics["peak_memory_bytes"] = 1.0  # type: ignore[index]
    over = Schedule(made, {}, as_rows(done), left)
    assert over.next() is None
    assert {trial.key for trial in over.not_requested()} == left
    assert [_said(one) for one in over.found()] == [_said(one) for one in again.found()]


@pytest.mark.parametrize("method", ALL)
def test_a_search_that_was_cut_off_ends_where_it_would_have(method: str) -> None:
    made = build(f"{{method: {method}}}")
    first = Machine()
    done = first.run(Schedule(made, {}, {}), stop=7)
    second = Schedule(made, {}, as_rows(done))
    machine = Machine()
    machine.draw = first.draw
    machine.run(second)
    reference = Schedule(made, {}, {})
    whole = Machine()
    whole.run(reference)
    assert [_said(one) for one in second.found()] == [_said(one) for one in reference.found()]
    assert len(first.worked) + len(machine.worked) == len(whole.worked)


def _said(found: StudyResult) -> tuple[str | None, tuple[str, ...], int]:
    return found.best, found.front, found.runs


def test_a_lucky_replica_does_not_decide() -> None:
    body = BODY.replace("size: [2, 4]", "size: 2").replace(
        "partition: auto, transport: auto", "partition: [zigzag, striped], transport: ring"
    )
    made = build("{method: grid}", body.replace("repeats: 9", "repeats: 1, replicas: 5"))
    schedule = Schedule(made, {}, {})
    while (work := schedule.next()) is not None:
        config = work.trial.config
        lucky = 9.0 if config.measure.replica == 2 else 30.0
        ms = (
            10.0 + (7 * config.measure.replica) % 5
            if config.strategy.partition == "zigzag"
            else lucky
        )
        schedule.tell(work, Outcome("ok", None, {"median_ms": ms}, {"ms": [ms]}))
    (found,) = schedule.found()
    best = next(trial for trial in found.trials if trial.key == found.best)
    assert (best.config.strategy.partition, best.config.measure.replica) == (
        "zigzag",
        1,
    )  # its middle one, 12 ms
    assert found.runs == 10


def test_a_round_ends_when_all_of_it_was_told() -> None:
    """Rings that work side by side answer in any order."""
    body = BODY.replace("size: [2, 4]", "size: 4")
    machine, schedule = Machine(), Schedule(build("{method: halving}", body), {}, {})
    works = []
    while (work := schedule.next()) is not None:
        works.append(work)
    assert len(works) > 2
    for work in reversed(works):
        assert schedule.next() is None
        schedule.tell(work, machine.outcome(work))
    following = schedule.next()
    assert following.repeats > works[0].repeats


@pytest.mark.parametrize("method", METHODS)
def test_a_tuning_measures_the_default(method: str) -> None:
    """Also where the spec names other strategies only."""
    body = BODY.replace("partition: auto, transport: auto", "partition: [striped, contiguous]")
    made, machine = build(f"{{method: {method}}}", body), Machine()
    schedule = Schedule(made, {}, {})
    done = machine.run(schedule)
    for study in schedule.found():
        (default,) = [t for t in study.trials if t.config.strategy.partition == "zigzag"]
        assert default.config.strategy.transport == "ring"
        assert len(done[default.key].samples["ms"]) == 9
        assert study.default == study.best == default.key
        assert not study.better


def test_only_a_lead_beyond_the_spread_beats_the_default() -> None:
    made = build("{method: grid}", BODY.replace("[2, 4]", "2"))
    default, *others = sorted(
        made.runnable,
        key=lambda t: (
            t.config.strategy.partition != "zigzag",
            t.config.strategy.transport != "ring",
        ),
    )

    def outcome(times: list[float]) -> Outcome:
        return Outcome("ok", None, {"median_ms": times[len(times) // 2]}, {"ms": times})

    for times, better in (([5.0, 5.1, 5.2], True), ([5.0, 8.0, 12.0], False)):
        done = {t.key: outcome([20.0] * 3) for t in others}
        done |= {default.key: outcome([9.0, 10.0, 11.0]), others[0].key: outcome(times)}
        found = outcome_of(made.runnable, done, ["median_ms"])
        assert (found.best, found.default) == (others[0].key, default.key)
        assert found.better == better
    # Memory has no spread.
    del done[others[0].key]
    light = Outcome("ok", None, {"peak_memory_bytes": 9.0}, {"ms": [1.0] * 3})
    heavy = Outcome("ok", None, {"peak_memory_bytes": 10.0}, {"ms": [1.0] * 3})
    found = outcome_of(
        made.runnable, {default.key: heavy, others[0].key: light}, ["peak_memory_bytes"]
    )
    assert found.better


@pytest.mark.parametrize(("other", "several"), [("peak_memory_bytes", True), ("tflops", False)])
def test_of_several_objectives_there_is_a_front(other: str, several: bool) -> None:
    made = build(f"{{method: grid, objectives: [median_ms, {other}]}}")
    schedule = Schedule(made, {}, {})
    Machine().run(schedule)
    study = schedule.found()[0]
    assert study.best in study.front
    assert (len(study.front) > 1) == several
