"""Machine load during a trial: read from counters, merged over ranks, and cheap."""

from __future__ import annotations

import itertools
import sys
import time
from functools import cache
from types import SimpleNamespace

import pytest

from ringray.lab.trial import machine_load
from ringray.lab.trial.machine_load import Watch


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
    found = watch.stop()
    assert found["gpu_percent"] == 98
    assert found["gpu_clock_mhz"] == 1755
    assert found["gpu_memory_bytes"] == 7 << 30
    # 150 J were counted between the two readings.
    assert found["gpu_power_watts"] == 150 / 0.25
    assert "gpu_celsius" not in found
    Watch("GPU-1").stop()
    assert len(opened) == 1
    assert "gpu_percent" not in Watch("GPU-2").stop()
