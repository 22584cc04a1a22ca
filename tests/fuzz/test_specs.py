"""Fuzzed specs: a spec that makes sense or a SpecError, within bounds of time, and nothing else."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ringray.base.errors import SpecError
from ringray.lab.plan.plan import build
from ringray.lab.predict import hardware
from ringray.lab.specs.model import parse
from tests.fuzz import check, runner
from tests.fuzz.generate import corpus, make

if TYPE_CHECKING:
    from pathlib import Path

    from ringray.lab.plan.plan import Plan

SEED = int(os.environ.get("RINGRAY_FUZZ_SEED", "20261121"))
ALL = 10_000
PART = 1_000
FEW = 250
GOOD = """\
version: 1
name: good
kind: latency
ring: {size: [2, 4]}
problem: {seq_len: [64, 100], heads: 4, kv_heads: [null, 2, 4]}
measure: {replicas: 2}
"""


def test_a_few(capsys: pytest.CaptureFixture[str]) -> None:
    found = runner.some(SEED, range(ALL, ALL + FEW))
    assert not found.wrong, runner.report(SEED, found)
    # None of it would be worth anything if all were refused at their first letter.
    for what in ("accepted", "refused spec", "refused plan"):
        assert found.counts[what] >= FEW // 20, found.counts


@pytest.mark.slow
@pytest.mark.rotating(10)
@pytest.mark.parametrize("first", range(0, ALL, PART))
def test_ten_thousand(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them take about 2 minutes of CPU time, shared among the cores."""
    found = runner.many(SEED, range(first, first + PART), os.cpu_count() or 1)
    with capsys.disabled():
        print("\n" + runner.report(SEED, found))
    assert not found.wrong
    assert found.counts.total() == PART
    assert found.counts["accepted"] >= PART // 20


def test_a_number_brings_a_case_back() -> None:
    assert [make(7, index) for index in range(50)] == [make(7, index) for index in range(50)]
    assert {how for how, _ in (make(7, index) for index in range(50))} == {
        "schema", "tree", "tokens", "bytes",
    }  # fmt: skip
    assert make(7, 1) != make(8, 1)


def test_every_experiment_is_sense() -> None:
    for text in corpus():
        spec = parse(text)
        check.accepted(spec, build(spec))


def test_what_is_wrong_is_told_with_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Plan:
        raise ValueError("a fault of the planner")

    monkeypatch.setattr(runner, "build", broken)
    found = runner.some(SEED, range(ALL, ALL + 40))
    assert found.wrong
    said = runner.report(SEED, found)
    assert f"python -m tests.fuzz.runner {SEED} {found.wrong[0][0]}\n" in said
    assert "a fault of the planner" in said


def test_a_case_that_takes_too_long_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(_: Path) -> None:
        while True:
            pass

    monkeypatch.setattr(runner, "load", endless)
    monkeypatch.setattr(runner, "CPU_S", 0.2)
    found = runner.some(SEED, range(1))
    assert "more than 0.2 s of CPU time" in found.wrong[0][1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flops", 1), ("flops", float("nan")), ("time_ms", float("inf")), ("time_ms", -1.0),
        ("peak_memory_bytes", 5), ("peak_memory_bytes", 1 << 62), ("sent_bytes", 1 << 62),
        ("sent_bytes", -1), ("sent_bytes", 0), ("balance", 1.5), ("balance", 0.0),
    ],
)  # fmt: skip
def test_the_checker_sees_wrong_costs(field: str, value: float) -> None:
    spec = parse(GOOD)
    plan = build(spec, hardware.cpu(2))
    check.accepted(spec, plan)
    first = plan.trials[0]
    assert first.predicted is not None
    wrong = replace(first, predicted=first.predicted._replace(**{field: value}))
    with pytest.raises(AssertionError):
        check.accepted(spec, replace(plan, trials=(wrong, *plan.trials[1:])))


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 3, "kv_heads": 2}, {"causal": False, "window": 3}, {"transport": "hybrid:3"},
        {"ring_size": 5000}, {"dtype": "int8"}, {"documents": [1, 2]}, {"seq_len": 0},
    ],
)  # fmt: skip
def test_the_checker_sees_points_that_cannot_run(change: dict[str, Any]) -> None:
    spec = parse(GOOD)
    plan = build(spec)
    wrong = replace(plan.trials[0], config=plan.trials[0].config.changed(**change))
    with pytest.raises(AssertionError):
        check.accepted(spec, replace(plan, trials=(wrong, *plan.trials[1:])))


def test_the_checker_sees_points_that_are_missing_or_doubled() -> None:
    spec = parse(GOOD)
    plan = build(spec)
    assert len(plan.trials) == 2 * 2 * 2 * 2  # kv_heads null is 4, and is measured once
    for trials in (plan.trials[:-1], (*plan.trials[:-1], plan.trials[0])):
        with pytest.raises(AssertionError):
            check.accepted(spec, replace(plan, trials=trials))


def test_the_checker_sees_errors_that_are_not_for_people() -> None:
    with pytest.raises(SpecError) as caught:
        parse("version: 1\nname: [1]\nkind: latency\n", "f.yaml")
    check.refused(str(caught.value), "f.yaml")
    for said in ("f.yaml: \x1b[2J", "pydantic", "", "f.yaml:1: a\nand a second line"):
        with pytest.raises(AssertionError):
            check.refused(said, "f.yaml")
