"""From what ranks report to recorded numbers, by the table of metrics; memory; machine load."""

from __future__ import annotations

import itertools
import math
import sys
import time
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ringray
from ringray.lab.predict.cost_model import Cost
from ringray.lab.report import words
from ringray.lab.report.replicas import together
from ringray.lab.specs.sections import OBJECTIVES
from ringray.lab.trial import machine_load
from ringray.lab.trial.machine_load import Watch
from ringray.lab.trial.measurement import RankReport, peak_memory, summarise, verdict
from ringray.lab.trial.metrics import (
    METRICS,
    Metric,
    columns,
    of_group,
    over_predicted,
    prediction_errors,
)
from ringray.lab.trial.outcome import Outcome
from tests.support.point import point
from tests.support.ranks import on_ring

CPU = torch.device("cpu")
MIB = 1 << 20
CONFIG = point(ring_size=2, heads=1)


def test_a_repeat_takes_as_long_as_its_slowest_rank() -> None:
    reports = [
        RankReport(
            0, [1, 2, 3, 4, 5], [1, 4, 8, 8, 1],
            {"wait_ms": [100, 200, 300, 400, 500], "sent_bytes": [100],
             "peak_memory_bytes": [5 * MIB]},
        ),
        RankReport(
            1, [2, 1, 4, 1, 1], [],
            {"wait_ms": [900, 900, 100, 100, 100], "sent_bytes": [50],
             "peak_memory_bytes": [7 * MIB]},
        ),
    ]  # fmt: skip
    metrics, samples = summarise(CONFIG.changed(batch=3), 10**13, reports)
    assert samples == {
        "ms": [2e3, 2e3, 4e3, 4e3, 5e3],
        "baseline_ms": [1e3, 4e3, 8e3, 8e3, 1e3],
        "ratio": [2, 0.5, 0.5, 0.5, 5],
    }
    assert metrics == {
        "median_ms": 4e3, "p20_ms": 2e3, "p80_ms": pytest.approx(4.2e3),
        "tflops": 2.5, "tflops_per_rank": 1.25, "tokens_per_s": 3 * 64 / 4,
        "wait_ms": 300,
        "baseline_ms": 4e3, "ratio": 0.5,  # of the pairs; that of the medians would be 1
        "sent_bytes": 150, "peak_memory_bytes": 7 * MIB,
    }  # fmt: skip


def test_what_was_not_measured_is_left_out() -> None:
    reports = [RankReport(rank, values={"sent_bytes": [0]}) for rank in range(2)]
    reports[0].errors = {"out": 0.5}
    metrics, samples = summarise(CONFIG, 1, reports)
    assert metrics == {"sent_bytes": 0, "error_out": 0.5}
    assert samples == {}
    metrics, samples = summarise(
        CONFIG, 1, [RankReport(rank, [1.0], [], {"wait_ms": [0.0]}) for rank in range(2)]
    )
    assert not {"ratio", "baseline_ms", "peak_memory_bytes"} & (metrics.keys() | samples.keys())


def test_a_second_visit_adds_its_repeats() -> None:
    def visit(ms: float, wait: float, peak: int) -> RankReport:
        values = {"wait_ms": [wait], "sent_bytes": [8], "peak_memory_bytes": [peak]}
        return RankReport(0, [ms / 1e3], [], values)

    metrics, samples = summarise(CONFIG, 1, [visit(10.0, 1.0, 7)])
    before = Outcome("ok", metrics=metrics, samples=samples)
    metrics, samples = summarise(CONFIG, 1, [visit(20.0, 4.0, 5)], before)
    assert samples == {"ms": [10.0, 20.0]}
    assert (metrics["repeats"], metrics["median_ms"]) == (2, 15.0)
    assert (metrics["wait_ms"], metrics["peak_memory_bytes"]) == (2.5, 7)
    assert metrics["sent_bytes"] == 8


@pytest.mark.parametrize("share", [1.001, math.inf, math.nan])
def test_an_error_beyond_the_budget_fails(share: float) -> None:
    found = verdict([RankReport(0, errors={"out": 0.2, "dq": share}), RankReport(1)])
    assert found.kind == "mismatch"
    reason = str(found)
    assert "budget" in reason
    assert "dq" in reason
    assert "out" not in reason


def test_a_failure_of_any_rank_fails() -> None:
    assert verdict([RankReport(0, errors={"out": 1.0}), RankReport(1)]) is None
    differs = verdict([RankReport(0), RankReport(1, failure="it differs")])
    assert str(differs) == "rank 1: it differs"


# The table of metrics, and all that follows from a line in it


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
    metrics, _ = summarise(CONFIG, 10**9, reports)
    assert metrics["stall_ms"] == 3.0
    assert columns("live")[-1] is new
    assert words.metric(new, metrics) == "3.00"
    assert together([metrics, {"stall_ms": 2.0}])["stall_ms"] == 2.0


def test_what_was_measured_is_compared_with_what_was_predicted() -> None:
    predicted = {"time_ms": 10.0, "peak_memory_bytes": 50}
    metrics = {"median_ms": 12.0, "peak_memory_bytes": 49.0}
    ratios = {"prediction_ratio": 1.2, "prediction_memory_ratio": 0.98}
    assert over_predicted(metrics, predicted) == pytest.approx(ratios)
    assert over_predicted({"median_ms": 12.0}, predicted) == pytest.approx(
        {"prediction_ratio": 1.2}
    )
    # Of other versions, of passes that were not timed, of a store that somebody changed.
    nothing = [{}, {"time_ms": 0.0}, {"time_ms": "10"}, {"time_ms": None}]
    assert all(over_predicted(metrics, useless) == {} for useless in nothing)
    assert over_predicted({"median_ms": float("nan")}, predicted) == {}


def test_a_prediction_errs_as_much_below_as_above() -> None:
    ratios = [1.1, 1 / 1.1, 2.0, 0.5, 1.0]
    errors = prediction_errors({"prediction_ratio": ratio} for ratio in ratios)
    assert errors["prediction_median_error"] == pytest.approx(0.1)
    assert errors["prediction_p90_error"] == pytest.approx(1.0)
    assert errors["prediction_trials"] == 5
    assert "prediction_memory_error" not in errors
    assert prediction_errors([{"prediction_memory_ratio": 1.5}]) == {}


# The memory meter


def block(mebibytes: int = 8) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8)


def one_after_the_other() -> None:
    x = block()
    del x
    block()


def both_at_once() -> None:
    x = block()
    y = block()
    del x, y
    block(4)


def test_the_meter_sees_what_is_live_at_once() -> None:
    assert peak_memory(one_after_the_other, CPU) == 8 * MIB
    assert peak_memory(both_at_once, CPU) == 16 * MIB
    assert peak_memory(lambda: None, CPU) == 0


def test_what_was_live_before_does_not_count() -> None:
    held = [block()]
    assert peak_memory(lambda: block(2), CPU) == 2 * MIB
    # Freeing it makes no room for more: what is asked is how much the work itself needs.
    assert peak_memory(lambda: (held.pop(), block(2)), CPU) == 2 * MIB


# Forward's memory beyond its inputs: a property of the shard, not of the ring

BATCH, HEADS, ROWS, HEAD_DIM = 1, 8, 2048, 64
CASES = [(dtype, causal) for dtype in (torch.bfloat16, torch.float32) for causal in (True, False)]


def measure_forward(folder: Path, rank: int, size: int) -> None:
    """One rank: writes the peak of a forward pass, by case, to ``folder``."""
    peaks = []
    for dtype, causal in CASES:
        q, k, v = (torch.randn(BATCH, HEADS, ROWS, HEAD_DIM).to(dtype) for _ in "qkv")
        attend = partial(ringray.ring_attention, q, k, v, causal=causal)
        attend()  # what a first call caches (positions, intervals) is not this call's
        peaks.append(peak_memory(attend, CPU))
    (folder / f"{rank}").write_text(" ".join(map(str, peaks)))


@pytest.mark.slow
def test_forward_needs_nine_blocks(tmp_path: Path) -> None:
    """The largest rank's peak, less lse, in blocks of B * S_local * H * D elements."""
    on_ring(4, [partial(measure_forward, tmp_path)])
    by_rank = [map(int, (tmp_path / f"{rank}").read_text().split()) for rank in range(4)]
    rows = BATCH * HEADS * ROWS
    for (dtype, causal), peaks in zip(CASES, zip(*by_rank, strict=True), strict=True):
        blocks = (max(peaks) - rows * 4) / (rows * HEAD_DIM * dtype.itemsize)
        assert blocks <= 9, f"{dtype}, causal {causal}: {blocks:.3f} blocks"


# Machine load during a trial: read from counters, merged over ranks, and cheap


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of day, which the test moves: a busy machine's goes as it likes."""
    now = [0.0]
    monkeypatch.setattr(machine_load.time, "perf_counter", lambda: now[0])
    return now


def _busy(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_cpu_time_is_told_from_waiting(clock: list[float]) -> None:
    watch = Watch()
    _busy(0.15)
    clock[0] += 0.2
    worked = watch.stop()
    watch = Watch()
    clock[0] += 20.0
    waited = watch.stop()
    assert worked["cpu_percent"] > 10 * waited["cpu_percent"]
    assert 75 <= worked["cpu_percent"] < 110
    assert 0 <= waited["host_cpu_percent"] <= 100
    assert 10 << 20 < worked["rss_bytes"] < 16 << 30


def test_a_gpu_is_read_through_nvml(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    energy, opened = itertools.count(5_000_000, 150_000), []
    nvml = SimpleNamespace(  # one H100-like device of which the temperature cannot be read
        NVMLError=LookupError, NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: opened.append(1),
        nvmlDeviceGetHandleByUUID={"GPU-1": "handle"}.__getitem__,
        nvmlDeviceGetTotalEnergyConsumption=lambda _: next(energy),
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=98, memory=40),
        nvmlDeviceGetClockInfo=lambda _, which: {1: 1755}[which],
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=7 << 30),
        nvmlDeviceGetTemperature=lambda _, which: {}[which],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(machine_load, "_gpu", cache(machine_load._gpu.__wrapped__))
    watch = Watch("GPU-1")
    clock[0] += 0.25
    load = watch.stop()
    assert load["gpu_percent"] == 98
    assert load["gpu_clock_mhz"] == 1755
    assert load["gpu_memory_bytes"] == 7 << 30
    # 150 J were counted between the two readings.
    assert load["gpu_power_watts"] == 150 / 0.25
    assert "gpu_celsius" not in load
    Watch("GPU-1").stop()
    assert len(opened) == 1
    assert "gpu_percent" not in Watch("GPU-2").stop()
