"""The table of metrics, and all that follows from a line in it."""

from __future__ import annotations

import pytest

from ringray.lab.predict.cost_model import Cost
from ringray.lab.report import words
from ringray.lab.report.replicas import together
from ringray.lab.specs.sections import OBJECTIVES
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.measurement import RankReport, summarise
from ringray.lab.trial.metrics import (
    METRICS,
    Metric,
    columns,
    of_group,
    over_predicted,
    prediction_errors,
)
from tests.support.tracking_store import config


def test_lines_of_the_table_fit_together() -> None:
    costs = set(Cost._fields)
    for name, metric in METRICS.items():
        assert name == metric.name
        assert {metric.upto, metric.beside, metric.over_predicted} - {""} <= set(METRICS)
        assert not metric.over_predicted or METRICS[metric.over_predicted].predicted
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


def test_what_was_measured_is_compared_with_what_was_predicted() -> None:
    predicted = {"time_ms": 10.0, "peak_memory_bytes": 50}
    metrics = {"median_ms": 12.0, "peak_memory_bytes": 49.0}
    found = {"prediction_ratio": 1.2, "prediction_memory_ratio": 0.98}
    assert over_predicted(metrics, predicted) == pytest.approx(found)
    assert over_predicted({"median_ms": 12.0}, predicted) == pytest.approx(
        {"prediction_ratio": 1.2}
    )
    # Of other versions, of passes that were not timed, of a store that somebody changed.
    nothing = [{}, {"time_ms": 0.0}, {"time_ms": "10"}, {"time_ms": None}]
    assert all(over_predicted(metrics, one) == {} for one in nothing)
    assert over_predicted({"median_ms": float("nan")}, predicted) == {}


def test_a_prediction_errs_as_much_below_as_above() -> None:
    ratios = [1.1, 1 / 1.1, 2.0, 0.5, 1.0]
    errors = prediction_errors({"prediction_ratio": one} for one in ratios)
    assert errors["prediction_median_error"] == pytest.approx(0.1)
    assert errors["prediction_p90_error"] == pytest.approx(1.0)
    assert errors["prediction_trials"] == 5
    assert "prediction_memory_error" not in errors
    assert prediction_errors([{"prediction_memory_ratio": 1.5}]) == {}
