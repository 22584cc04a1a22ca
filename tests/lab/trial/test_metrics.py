"""The table of metrics, and all that follows from a line in it."""

from __future__ import annotations

import pytest

from ringray.lab.plan.cost_model import Cost
from ringray.lab.report import words
from ringray.lab.report.replicas import together
from ringray.lab.spec.model import OBJECTIVES
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.measurement import RankReport, summarise
from ringray.lab.trial.metrics import METRICS, Metric, columns, of_group
from tests.support.tracking_store import config


def test_lines_of_the_table_fit_together() -> None:
    costs = set(Cost._fields)
    for name, metric in METRICS.items():
        assert name == metric.name
        assert {metric.upto, metric.beside} - {""} <= set(METRICS)
        assert {metric.predicted} - {""} <= costs
        if {"results", "live"} & {*metric.tables}:
            assert metric.heading, name
    assert not set(OBJECTIVES) & {*of_group("load"), "repeats"}


def test_a_new_metric_of_a_kind_is_one_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Metric("stall_ms", "ms", "time", max, replicas=min, heading="stall ms", tables=("live",))
    monkeypatch.setitem(METRICS, "stall_ms", new)
    reports = [RankReport(rank, [0.1], values={"stall_ms": [2.0 + rank]}) for rank in range(2)]
    metrics, _ = summarise(TrialConfig.from_dict(config(0)), 10**9, reports)
    assert metrics["stall_ms"] == 3.0
    assert columns("live")[-1] is new
    assert words.metric(new, metrics) == "3.00"
    assert together([metrics, {"stall_ms": 2.0}])["stall_ms"] == 2.0


def test_a_metric_that_a_rank_lacks_is_left_out() -> None:
    reports = [RankReport(0, [0.1], values={"wait_ms": [1.0]}), RankReport(1, [0.1])]
    assert "wait_ms" not in summarise(TrialConfig.from_dict(config(0)), 10**9, reports)[0]
