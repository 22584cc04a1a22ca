"""Simulated sweeps with known answers: noise of many shapes, and machines whose speed drifts."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome, SweepInfo, TrialInfo, TrialRow

PARTITIONS = ("contiguous", "striped", "zigzag", "zigzag-token", "ring", "mesh")
DRIFTS = ("uniform", "linear", "step", "wave")
# What differs between measurements of one point; of each two replicas unless its name says more.
SHAPES = (
    "1%", "12%", "half 12%", "heavy tails", "outliers", "drift", "step", "alike", "two modes",
    "2 repeats", "3 repeats", "noisy baseline",
)  # fmt: skip


def drifting(seed: int, gap: float, drift: str, noise: float = 0.02) -> list[Outcome]:
    """Trials of points each ``gap`` slower than the one before, in turns with a baseline of 10 ms,
    on a machine that becomes up to 4 times slower."""
    draw = random.Random(seed)
    order = draw.sample(range(4), 4)
    phase, found = draw.uniform(0, 6), {}
    for turn, point in enumerate(order):
        slower = {
            "uniform": 4 ** draw.random(), "linear": 1 + turn, "step": 4.0 if turn > phase else 1.0,
            "wave": 2 ** (1 + math.sin(phase + turn)),
        }[drift]  # fmt: skip
        times, beside = (
            [base * slower * math.exp(draw.gauss(0, noise)) for _ in range(5)]
            for base in (8 * math.exp(gap * point), 10.0)
        )
        found[point] = timed(times, beside)
    return [found[point] for point in range(4)]


def timed(times: list[float], beside: list[float]) -> Outcome:
    """The end of a trial with these times of the ring and of the baseline."""
    samples = {"ms": times, "baseline_ms": beside}
    samples["ratio"] = [one / other for one, other in zip(times, beside, strict=True)]
    names = {"ms": "median_ms", "baseline_ms": "baseline_ms", "ratio": "ratio"}
    metrics = {names[name]: statistics.median(values) for name, values in samples.items()}
    return Outcome("ok", None, metrics, samples, "p" * 64, 1, 1.0, 2.0)


def stored(store: Store, digest: str, outcomes: list[Outcome]) -> list[TrialRow]:
    """The rows of a sweep over partitions, as a store returns them."""
    config = {"seq_len": 64, "ring_size": 2, "baseline": "sdpa", "baseline_threads": 2}
    trials = [
        TrialInfo(f"{at}{digest}"[:16], at, {**config, "partition": PARTITIONS[at]}, {})
        for at in range(len(outcomes))
    ]
    store.begin(SweepInfo(digest, "s", "latency", {}, "", {}), trials)
    for trial, outcome in zip(trials, outcomes, strict=True):
        store.record(digest, trial.key, outcome)
    return store.trials(digest)


def side(
    shape: str,
    seed: int,
    began: float,
    points: int = 12,
    replicas: int = 2,
    slower: Any = (),
    factor: float = 1.1,
) -> list[TrialRow]:
    """Replicas of points, measured in turns; ``slower``: points that take ``factor`` times as
    long."""
    draw = random.Random(seed)
    repeats = int(shape[0]) if shape.endswith("repeats") else 5
    step, alike, rows = draw.random(), 0.0, []
    for at in range(points * replicas):
        replica, point = divmod(at, points)
        noise = 0.12 if shape == "12%" or (shape.startswith("half") and point % 2) else 0.01
        level = draw.gauss(0, noise)
        if shape == "heavy tails":
            level = 0.01 * draw.gauss(0, 1) / math.sqrt(draw.gammavariate(1, 1))
        elif shape == "two modes":
            level += draw.choice((0.1, -0.1))
        elif shape == "drift":
            level += 0.2 * at / points / replicas
        elif shape == "step":
            level += 0.2 * (at > step * points * replicas)
        elif shape == "alike":
            alike = 0.8 * alike + draw.gauss(0, 0.02)
            level += alike
        outlier = shape == "outliers"
        times = [
            (5 + point) * (factor if point in slower else 1)
            * math.exp(level + draw.gauss(0, 0.01)) * (3 if outlier and draw.random() < 0.05 else 1)
            for _ in range(repeats)
        ]  # fmt: skip
        wide = 0.15 if shape == "noisy baseline" else 0.01
        ended = timed(times, [10 * math.exp(draw.gauss(0, wide)) for _ in times])
        config = {"seq_len": 64 + point, "partition": "zigzag", "replica": replica}
        rows.append(
            TrialRow(
                f"{at}", point, config, {}, "ok", None, dict(ended.metrics), dict(ended.samples),
                "p", 1, began + at, began + at + 0.5, {},
            )
        )  # fmt: skip
    return rows
