"""Fuzzed specs: a spec that makes sense or a SpecError, within bounds of time, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringray.lab.plan.plan import build
from ringray.lab.predict import hardware
from ringray.lab.specs.model import parse
from tests.fuzz import runner
from tests.fuzz.generate import corpus, make

SEED = 20261121
ALL = 10_000
FEW = 300


def test_a_few() -> None:
    results = runner.run_some(SEED, range(ALL, ALL + FEW))
    assert not results.wrong, results.report(SEED)
    # None of it would be worth anything if all were refused at their first letter.
    for what in ("accepted", "refused spec", "refused plan"):
        assert results.counts[what] >= FEW // 20, results.counts


@pytest.mark.exhaustive
def test_ten_thousand() -> None:
    results = runner.run_many(SEED, range(ALL))
    print("\n" + results.report(SEED))
    assert not results.wrong


def test_a_number_brings_a_case_back() -> None:
    assert [make(7, index) for index in range(50)] == [make(7, index) for index in range(50)]
    assert make(7, 1) != make(8, 1)


def test_what_is_wrong_is_told_with_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "check_accepted", lambda spec, plan: 1 / 0)
    results = runner.run_some(SEED, range(ALL, ALL + 40))
    assert f"python -m tests.fuzz.runner {SEED} {results.wrong[0][0]}\n" in results.report(SEED)
    assert "division by zero" in results.report(SEED)


def test_a_case_that_takes_too_long_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(runner, "load", endless)
    monkeypatch.setattr(runner, "CPU_S", 0.2)
    results = runner.run_some(SEED, range(1))
    assert "more than 0.2 s of CPU time" in results.wrong[0][1]


@pytest.mark.parametrize(
    ("field", "value"),
    [("time_ms", float("inf")), ("time_ms", -1.0), ("peak_memory_bytes", 5), ("sent_bytes", 0)],
)
def test_the_checker_sees_wrong_costs(field: str, value: float) -> None:
    spec = parse(corpus()[0])
    plan = build(spec, hardware.cpu(2))
    first = next(trial for trial in plan.trials if trial.predicted and trial.predicted.sent_bytes)
    assert first.predicted is not None
    wrong = replace(first, predicted=first.predicted._replace(**{field: value}))
    with pytest.raises(AssertionError):
        runner.check_cost(first.config.as_dict(), wrong.predicted)


def test_the_checker_sees_errors_that_are_not_for_people() -> None:
    runner.check_refused("f.yaml:1: name: got 3, expected a text", "f.yaml")
    for message in ("f.yaml: \x1b[2J", "pydantic", "", "f.yaml:1: a\nand a second line"):
        with pytest.raises(AssertionError):
            runner.check_refused(message, "f.yaml")
