"""Machine load during a trial: read from counters, merged over ranks, and cheap."""

from __future__ import annotations

import sys
import time
from functools import cache
from types import SimpleNamespace
from typing import Any

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


class FakeNvml:
    """Stands for pynvml: one H100-like device of which the temperature cannot be read."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.energy = 5_000_000
        self.opened = 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self.energy += 150_000
        return self.energy

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=98, memory=40)

    def nvmlDeviceGetClockInfo(self, handle: str, which: int) -> int:
        assert which == self.NVML_CLOCK_SM
        return 1755

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=7 << 30)

    def nvmlDeviceGetTemperature(self, handle: str, which: int) -> int:
        raise self.NVMLError("not supported")


def test_a_gpu_is_read_through_nvml(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)  # type: ignore[arg-type]
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
    assert nvml.opened == 1
    assert "gpu_percent" not in Watch("GPU-2").stop()
