"""Timing: contenders alternate in rounds, with samples long enough to be reliable.

A shared or warming device drifts by more than the differences of interest, so the contenders of a
point are interleaved, never timed in sequence, and compared by their medians.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Calls = Sequence[Callable[[], Any]]

_WARM_UP = 2
_ESTIMATE = 3
_MAX_CALLS = 2000
# Cycles that the device waits before timed calls, so that the host is ahead and its launches are
# not measured: about 2 ms before the calls of a sample, 6 ms before the hops of a rank.
_SAMPLE_HEAD_START = 4_000_000
_HEAD_START = 10_000_000


@dataclass(frozen=True)
class Effort:
    """``rounds`` samples of each contender, of at least about ``sample_ms`` milliseconds each;
    ``burst_ms``: milliseconds of one long sample afterwards, 0 for none."""

    rounds: int = 20
    sample_ms: float = 2.0
    burst_ms: float = 0.0


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call over the rounds. ``calls``: calls in one sample."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    calls: int

    @classmethod
    def of(cls, samples: Sequence[float], calls: int = 1) -> Timing:
        """Returns the quantiles of the samples, with linear interpolation."""
        median, p20, p80 = (float(np.quantile(samples, share)) for share in (0.5, 0.2, 0.8))
        return cls(median, p20, p80, calls)


def sample(calls: Calls, count: int, first: int, device: torch.device) -> float:
    """Returns milliseconds per call of ``count`` calls, rotating over ``calls`` from ``first``."""

    def rotate() -> None:
        for i in range(count):
            calls[(first + i) % len(calls)]()

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    clock = Clock(device)
    clock.head_start(_SAMPLE_HEAD_START)
    clock.time(rotate)
    return clock.milliseconds()[0] / count


def interleaved(
    contenders: Mapping[str, Calls],
    device: torch.device,
    effort: Effort,
    mark: Callable[[str], None] = lambda _: None,
) -> dict[str, Timing | Exception]:
    """Returns the timing of each contender, or its error; a failed one skips later rounds.

    ``mark`` receives the contender before each of its samples.
    """
    counts: dict[str, int] = {}
    failed: dict[str, Exception] = {}
    for name, calls in contenders.items():
        mark(f"timing {name}")
        try:
            sample(calls, max(_WARM_UP, len(calls)), 0, device)
            each = sample(calls, _ESTIMATE, 0, device)
            counts[name] = max(1, min(_MAX_CALLS, math.ceil(effort.sample_ms / max(each, 1e-6))))
        except Exception as error:  # of any type: other contenders go on
            failed[name] = error.with_traceback(None)
    samples: dict[str, list[float]] = {name: [] for name in counts}
    for turn in range(effort.rounds):
        # All contenders take all places equally often.
        order = list(counts)
        shift = turn % max(1, len(order))
        for name in order[shift:] + order[:shift]:
            if name in failed:
                continue
            mark(f"timing {name}")
            try:
                each = sample(contenders[name], counts[name], turn * counts[name], device)
            except Exception as error:
                failed[name] = error.with_traceback(None)
            else:
                samples[name].append(each)
    timed = [name for name in samples if name not in failed]
    return {**{name: Timing.of(samples[name], counts[name]) for name in timed}, **failed}


def above_peak(flops: float, timing: Timing, peak_tflops: float | None) -> str | None:
    """Returns why a figure is impossible, or None: a fifth of the samples beats the hardware."""
    fastest = tflops(flops, timing.p20_ms)
    if peak_tflops is None or fastest <= peak_tflops:
        return None
    return f"{fastest:.0f} TFLOP/s is above the hardware's peak of {peak_tflops:.0f}"


def tflops(flops: float, milliseconds: float) -> float:
    """Returns ``flops`` in ``milliseconds`` as TFLOP/s."""
    return flops / (milliseconds * 1e9)


class Clock:
    """A clock for calls: events on a GPU, a timer on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[Any, Any]] = []

    def head_start(self, cycles: int = _HEAD_START) -> None:
        """Keeps the device busy while the host launches the next timed calls."""
        if self.device.type == "cuda":
            torch.cuda._sleep(cycles)

    def time(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Times a call and returns its result."""
        start = self._now()
        result = call(*arguments, **named)
        self.marks.append((start, self._now()))
        return result

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> list[float]:
        """Returns the milliseconds of all calls since the last query, in order."""
        marks, self.marks = self.marks, []
        if self.device.type != "cuda":
            return [(stop - start) * 1e3 for start, stop in marks]
        for _, stop in marks[-1:]:
            stop.synchronize()
        return [start.elapsed_time(stop) for start, stop in marks]
