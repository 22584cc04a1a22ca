"""Sweeps for tests of figures: rows as a store has them, of configurations that are given."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from ringray.lab.trial.outcome import TrialRow
from tests.support.tracking_store import config


def row(index: int, metrics: dict[str, float], status: Any = "ok", **changes: Any) -> TrialRow:
    """One trial; ``changes`` are of its configuration."""
    key = f"{index:016x}"
    reason = None if status == "ok" else f"it {status}"
    return TrialRow(
        key, index, config(0) | changes, {}, status, reason, metrics, {}, "", 1, 1.0, 2.0, None
    )


def grid(**axes: list[Any]) -> list[dict[str, Any]]:
    """Every combination of the values of ``axes``."""
    return [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


def timed(ms: float, mib: float = 10.0, baseline: float | None = 100.0) -> dict[str, float]:
    """Metrics of a trial of kind latency, as ``measure.summarise`` makes them."""
    found = {
        "median_ms": ms, "p20_ms": ms * 0.99, "p80_ms": ms * 1.01, "tflops": 2.0 / ms,
        "peak_memory_bytes": mib * 2**20,
    }  # fmt: skip
    return found | ({"baseline_ms": baseline, "ratio": ms / baseline} if baseline else {})


def strategies() -> list[TrialRow]:
    """Two directions, two lengths, four strategies: all figures but that of blocks."""
    points = grid(
        seq_len=[2048, 8192],
        direction=["forward", "forward+backward"],
        partition=["contiguous", "zigzag"],
        transport=["ring", "allgather"],
    )
    return [row(i, timed(10.0 + 7 * i % 11, 10.0 + i), **point) for i, point in enumerate(points)]


def tiles() -> list[TrialRow]:
    """Blocks of two Triton kernels, and the default."""
    points = grid(kernel=["forward", "dkv"], m=[64, 128], n=[32, 64, 128], warps=[4, 8])
    texts = [f"{p['kernel']}={p['m']}x{p['n']}/{p['warps']}/2" for p in points]
    rows = [row(i, timed(5.0 + 5 * i % 7), blocks=text) for i, text in enumerate(texts)]
    return [*rows, row(len(rows), timed(6.0), blocks=None)]


def cuts() -> list[TrialRow]:
    """ATen's row blocks by threads."""
    points = grid(blocks=[64, 256, 1024], threads=[1, 2])
    return [row(i, timed(5.0 + 3 * i % 5), **point) for i, point in enumerate(points)]


def tasks() -> list[TrialRow]:
    """Trainings of a task, examined at two lengths by depth, and one that failed."""
    rows = [row(i, {"score": 0.5 + i / 10}, seq_len=64 << i, ring_size=1 + i) for i in range(2)]
    samples = {"score 64": [1.0, 0.5, 0.0], "score 128": [0.2, 0.4, 0.9], "loss": [3.0, 2.0]}
    failed = row(2, {}, "failed", seq_len=512)
    return [*(replace(one, samples=samples) for one in rows), failed]


def contexts() -> list[TrialRow]:
    """Trainings of a task without depths, in replicas, by length."""
    points = grid(seq_len=[64, 256], replica=[0, 1])
    rows = [row(i, {"score": 0.1 * i}, **point) for i, point in enumerate(points)]
    return [replace(one, samples={f"score {one.config['seq_len']}": [0.3]}) for one in rows]


def predictions() -> list[TrialRow]:
    """Strategies whose times and memory were predicted, too small by a tenth."""
    return [
        replace(one, predicted={"time_ms": one.metrics["median_ms"] / 1.1,
                                "peak_memory_bytes": one.metrics["peak_memory_bytes"] / 1.1})
        for one in strategies()
    ]  # fmt: skip


def trainings() -> list[TrialRow]:
    """Trainings with their losses by step."""
    rows = [row(i, {"loss": 1.5 - i}, seq_len=512 << i) for i in range(2)]
    losses = [[4.0, 3.0, 1.5], [4.0, 2.0, 0.5]]
    return [replace(one, samples={"loss": loss}) for one, loss in zip(rows, losses, strict=True)]


SWEEPS = {
    "strategies": strategies, "tiles": tiles, "cuts": cuts, "tasks": tasks, "contexts": contexts,
    "trainings": trainings,
}  # fmt: skip
