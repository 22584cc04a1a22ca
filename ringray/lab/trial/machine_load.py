"""Load of a rank and its host while a trial ran, GPU readings included.

Everything is read before and after the trial, never while it runs: counters of CPU time and energy
give means over the whole trial, warm-up and baseline included, for two reads (0.05 ms on a CPU)
and without a thread that samples beside the measured code. Clock, temperature and memory have no
counter; they are read at the end of the trial. Linux counts a host's CPU time in steps of 10 ms,
and GPUs their energy in about as large ones, so both say little of trials below 0.2 s.

Imports neither torch nor Ray. GPUs are read through NVML; without it (no NVIDIA GPU, no permission)
their metrics are left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from statistics import mean
from typing import Any, NamedTuple

BUSY = 0.15  # share of a host's cores that other processes may use


class Load(NamedTuple):
    """A reading of the machine. ``ranks``: how several ranks' values become one; ``now``: reads it
    from NVML and a device's handle when the trial has ended."""

    unit: str
    ranks: Callable[[Sequence[float]], float]
    now: Callable[[Any, Any], float] | None = None


LOADS: dict[str, Load] = {
    "cpu_percent": Load("%", mean),  # of one core, by the rank
    "host_cpu_percent": Load("%", max),  # of all cores, by every process on the host
    "rss_bytes": Load("bytes", max),  # resident memory of the rank's process
    "niceness": Load("", max),  # of the rank; Ray starts its workers with 15
    # Share of the last moments in which a kernel ran.
    "gpu_percent": Load("%", mean, lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
    "gpu_power_watts": Load("W", mean),  # mean over the trial
    # Clock of the SMs.
    "gpu_clock_mhz": Load(
        "MHz", min, lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
    ),
    # In use on the device, by all processes.
    "gpu_memory_bytes": Load(
        "bytes", max, lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used
    ),
    "gpu_celsius": Load(
        "°C",
        max,
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
}
"""The metrics of the machine, by name. To add one, give it a line here and, unless it has a
``now``, set it in :meth:`Watch.stop`."""


class Watch:
    """The load since its construction, which :meth:`stop` returns.

    ``gpu``: the UUID of the rank's GPU, None on a CPU.
    """

    def __init__(self, gpu: str | None = None) -> None:
        import psutil

        self._process = psutil.Process()
        self._gpu = _gpu(gpu) if gpu else None
        self._energy = self._read(_millijoules)
        psutil.cpu_percent()  # the next call is relative to this one
        self._cpu = time.process_time()
        self._began = time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Returns readings by the names of :data:`LOADS`, without those that this machine lacks."""
        import psutil

        wall = max(time.perf_counter() - self._began, 1e-9)
        energy = self._read(_millijoules)
        loads = {
            "cpu_percent": (time.process_time() - self._cpu) / wall * 100,
            "host_cpu_percent": psutil.cpu_percent(),
            "rss_bytes": float(self._process.memory_info().rss),
            "niceness": float(os.nice(0)),
        }
        if energy is not None and self._energy is not None:
            loads["gpu_power_watts"] = (energy - self._energy) / 1e3 / wall
        readings = {name: self._read(load.now) for name, load in LOADS.items() if load.now}
        return loads | {name: value for name, value in readings.items() if value is not None}

    def _read(self, reading: Callable[[Any, Any], float]) -> float | None:
        """Returns a reading of the GPU; None without one, or if it does not support it."""
        if self._gpu is None:
            return None
        nvml, device = self._gpu
        try:
            return float(reading(nvml, device))
        except nvml.NVMLError:
            return None


def _millijoules(nvml: Any, device: Any) -> float:
    """Returns the energy since the driver was loaded."""
    return float(nvml.nvmlDeviceGetTotalEnergyConsumption(device))


@cache  # NVML takes milliseconds to open
def _gpu(uuid: str) -> tuple[Any, Any] | None:
    """Returns NVML and its handle of a GPU; None where it does not know it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # no NVML, or an error of one of many drivers
        return None
