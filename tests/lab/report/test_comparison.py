"""Comparisons of two sweeps: which changes are told from the noise, and which are not."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from ringray.base.errors import UserError
from ringray.lab.report import comparison_views as views
from ringray.lab.report.comparison import ComparedSide, Comparison, compare
from ringray.lab.trial.outcome import TrialRow

QUIET = {"equal", "not decided"}
HERE = {"hardware": {"cores": 2}, "versions": {"torch": "2.13.0"}, "kernels": "k" * 64}


def row(point: int, replica: int, ms: list[float], **config: Any) -> TrialRow:
    fields = {"seq_len": 64 + point, "partition": "zigzag", "repeats": len(ms), **config}
    return TrialRow(
        f"{point}-{replica}",
        point,
        {**fields, "replica": replica},
        {},
        "ok",
        None,
        {"median_ms": statistics.median(ms), "tflops": 1 / statistics.median(ms)},
        {"ms": ms},
        "p",
        1,
        float(replica),
        float(replica),
        HERE,
    )


def rows(
    points: int = 6, replicas: int = 3, seed: int = 0, slower: float = 1.0, noise: float = 0.01
) -> list[TrialRow]:
    draw = random.Random(seed)
    return [
        row(
            point,
            replica,
            [(5 + point) * slower * math.exp(level + draw.gauss(0, noise)) for _ in range(5)],
        )
        for replica in range(replicas)
        for point in range(points)
        for level in [draw.gauss(0, noise)]
    ]


def side(measured: list[TrialRow], label: str = "a", **spec: Any) -> ComparedSide:
    return ComparedSide(label, label, "ab12" * 16, spec, measured)


def compared(a: list[TrialRow], b: list[TrialRow], metric: str = "median_ms") -> Comparison:
    return compare(side(a), side(b, "b"), metric)


def test_one_point_of_many_is_found_and_named() -> None:
    b = rows(40, seed=1)
    b = [
        replace(one, metrics={"median_ms": one.metrics["median_ms"] * 1.5})
        if one.index == 7
        else one
        for one in b
    ]
    found = compared(rows(40), b)
    slow = [one for one in found.points if one.verdict not in QUIET]
    assert [(one.config["seq_len"], one.verdict) for one in slow] == [(71, "slower")]
    assert found.verdict == "equal"
    assert found.regressions(0.05) == slow
    assert found.regressions(0.6) == []
    assert "1 point worse by more than 5%" in views.failure(found, 0.05)


@pytest.mark.parametrize("points", [1, 2, 5])
def test_a_drift_that_neighbouring_rounds_share_is_no_noise(points: int) -> None:
    """A machine that becomes 4% slower from round to round hides 5% from sides that were not
    measured in turns."""

    def turned(by: float, apart: int, first: int) -> list[TrialRow]:
        draw = random.Random(first)
        return [
            replace(
                row(at, 0, [10 * by * 1.04**turn * math.exp(draw.gauss(0, 0.004))] * 3),
                ended=turn * apart + first + at / 100,
            )
            for turn in range(7)
            for at in range(points)
        ]

    in_turns = compared(turned(1, 2, 0), turned(1.05, 2, 1))
    assert in_turns.verdict == "slower"
    assert in_turns.overall.low < 1.05 < in_turns.overall.high < 1.1
    assert compared(turned(1, 2, 0), turned(1, 2, 1)).verdict == "equal"
    assert compared(turned(1, 1, 0), turned(1.05, 1, 20)).verdict == "not decided"


def test_points_measured_once_assume_a_noise() -> None:
    found = compared(rows(replicas=1), rows(replicas=1, seed=1, slower=1.08))
    assert (found.assumed, found.verdict) == (True, "not decided")
    assert any("measured once" in line for line in views.answer(found))
    assert compared(rows(replicas=1), rows(replicas=1, slower=1.5)).verdict == "slower"
    assert not compared(rows(), rows()).assumed


def test_more_is_better_of_some_metrics() -> None:
    found = compared(rows(), rows(slower=1.5), "tflops")
    assert found.verdict == "worse"
    assert found.overall.ratio < 1
    assert found.regressed(0.4)
    assert not found.regressed(0.6)
    assert compared(rows(slower=1.5), rows(), "tflops").verdict == "better"


def test_exact_metrics_have_no_noise() -> None:
    def sent(count: float) -> list[TrialRow]:
        return [replace(one, metrics={"sent_bytes": count}) for one in rows(replicas=1)]

    assert compared(sent(1000), sent(1000), "sent_bytes").verdict == "equal"
    assert compared(sent(1000), sent(1001), "sent_bytes").verdict == "worse"


def test_pairs_ignore_how_often_a_point_was_measured_but_not_what_it_is() -> None:
    a, b = rows(3, replicas=2), rows(4, replicas=5, seed=1)
    later = [replace(one, ended=100.0 + one.config["replica"]) for one in b]
    b = [replace(one, config={**one.config, "repeats": 50, "warmup": 9}) for one in later]
    found = compared(a, b)
    assert len(found.points) == 3
    assert [[one["seq_len"] for one in side] for side in found.only] == [[], [67]]
    assert {one.replicas for one in found.points} == {(2, 5)}
    b = [replace(one, config={**one.config, "partition": "striped"}) for one in b]
    with pytest.raises(UserError, match="share no point: partition zigzag against striped"):
        compared(a, b)
    with pytest.raises(UserError, match="b has no trial"):
        compared(a, [])
    with pytest.raises(UserError, match="none has a positive loss"):
        compared(a, a, "loss")


def test_a_point_that_ends_otherwise_is_lost_or_gained() -> None:
    broken = [
        replace(one, status="oom", reason="too <b>large</b>", metrics={}, samples={})
        if one.index == 0
        else one
        for one in rows()
    ]
    found = compared(rows(), broken)
    assert [one.verdict for one in found.points].count("lost") == 1
    assert found.regressions(9.0) == [found.points[0]]
    assert views.failure(found, 9.0) == "1 point without a result in B"
    assert views.worst(found)[0].reason == "oom: too <b>large</b>"
    back = compared(broken, rows())
    assert [one.verdict for one in back.points].count("gained") == 1
    assert not back.regressions(0.0)
    assert compared(broken, broken).points[0].verdict == "absent"
    page = views.html(found, 0.05)
    assert "too &lt;b&gt;large" in page
    assert "1 point without a result in B" in page
    assert "<b>" not in page


def test_what_changed_is_told() -> None:
    other = HERE | {"versions": {"torch": "2.14.0"}, "git": {"commit": "f" * 40, "dirty": False}}
    b = [replace(one, environment=other, config={**one.config, "repeats": 9}) for one in rows()]
    spec = {"measure": {"repeats": 5}, "name": "a", "tracking": {"uri": "x"}}
    changed = {**spec, "measure": {"repeats": 9}, "name": "b", "tracking": {"uri": "y"}}
    found = compare(side(rows(), **spec), side(b, "b", **changed))
    assert views.changes(found) == [
        "commit: – → fffffff",
        "torch: 2.13.0 → 2.14.0",
        "repeats: 5 → 9",
        "spec.measure.repeats: 5 → 9",
    ]
    assert compared(rows(), rows()).changes == []


def test_an_interval_that_holds_both_sides_of_the_limit_decides_nothing() -> None:
    a, b = (rows(seed=seed, noise=0.04, replicas=5) for seed in (0, 1))
    b = [
        replace(one, metrics={"median_ms": one.metrics["median_ms"] * 1.1})
        if one.index == 2
        else one
        for one in b
    ]
    found = compared(a, b)
    assert found.points[2].verdict == "not decided"
    assert views.failure(found, 0.05) == ""
    assert views.doubt(found, 0.05).startswith("not decided: ")
    assert "may be worse by more than 5%" in views.doubt(found, 0.05)
    assert found.points[2] in found.doubtful(0.05)
    assert "not decided" in views.html(found, 0.05)
    quiet = compared(rows(), rows(seed=1))
    assert views.doubt(quiet, 0.2) == ""
