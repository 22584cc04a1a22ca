"""Predicted beside measured times of rings on this machine, at points that no calibration has seen.

    ringray calibrate && python experiments/prediction.py

Measures a few sweeps of the platform in a store of their own, the points of each in turns, and
predicts each point from the calibration alone. ``--measured F`` keeps the measurements, and
predicts anew those that F has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringray.lab.plan.plan import build
from ringray.lab.predict import calibration, cost_model
from ringray.lab.predict.hardware import LOCAL, Fleet
from ringray.lab.specs.model import parse
from ringray.lab.trial.config import TrialConfig, default_config

LEAST_TURNS, MOST_TURNS = 3, 9
CLOSE = 0.03  # a choice that is slower than the best by less is as good

# Ring, length, heads, head dim, dtype and direction of each problem; rows per rank lie between
# those of a calibration.
PROBLEMS = (
    (1, 1536, 2, 64, "float32", "forward"),
    (1, 6144, 2, 64, "float32", "forward+backward"),
    (1, 12288, 1, 128, "bfloat16", "forward"),
    (1, 3072, 2, 128, "bfloat16", "forward+backward"),
    (2, 1280, 4, 64, "float32", "forward+backward"),
    (2, 1536, 8, 128, "float32", "forward"),
    (2, 2560, 4, 128, "bfloat16", "forward"),
    (2, 3072, 2, 64, "float32", "forward+backward"),
    (2, 5120, 2, 64, "bfloat16", "forward"),
    (2, 6144, 2, 128, "bfloat16", "forward+backward"),
    (2, 12288, 2, 64, "float32", "forward"),
    (4, 1280, 4, 64, "bfloat16", "forward+backward"),
    (4, 2560, 8, 64, "float32", "forward"),
    (4, 3200, 4, 128, "float32", "forward"),
    (4, 5120, 4, 128, "bfloat16", "forward+backward"),
    (4, 6144, 4, 64, "float32", "forward+backward"),
    (4, 7168, 4, 64, "float32", "forward"),
    (4, 12288, 4, 64, "bfloat16", "forward"),
    (8, 2560, 8, 64, "float32", "forward+backward"),
    (8, 3072, 8, 64, "bfloat16", "forward+backward"),
    (8, 4608, 8, 64, "bfloat16", "forward"),
    (8, 5120, 8, 128, "float32", "forward"),
    (8, 6144, 8, 128, "bfloat16", "forward"),
    (8, 16000, 8, 64, "float32", "forward"),
)
Strategies = dict[tuple[str, ...], tuple[str, ...]]  # partitions and their transports
ALONE: Strategies = {("zigzag",): ("ring",)}
PAIR: Strategies = {
    ("contiguous", "zigzag"): ("ring", "allgather", "ulysses"),
    ("striped", "zigzag-token"): ("ring",),
}
LARGE: Strategies = {
    ("zigzag",): (
        "ring", "bidirectional", "double-ring:2", "allgather", "hybrid:2", "ulysses", "staged",
    ),
    ("contiguous", "striped", "zigzag-token"): ("ring",),
}  # fmt: skip
STRATEGIES = {1: ALONE, 2: PAIR, 4: LARGE, 8: LARGE}


class Point(NamedTuple):
    """One strategy of a problem: measured and predicted ms, bytes per rank and bytes sent.
    ``turns``: the measured ms of each turn."""

    config: TrialConfig
    turns: tuple[float, ...]
    predicted_ms: float
    memory: float
    predicted_memory: float
    sent: int
    predicted_sent: int

    @property
    def ms(self) -> float:
        """Returns the median of the turns."""
        return statistics.median(self.turns)

    @property
    def error(self) -> float:
        """Returns the relative error of the predicted time."""
        return self.predicted_ms / self.ms - 1

    @property
    def problem(self) -> tuple[Any, ...]:
        one = self.config
        problem = one.problem
        sizes = one.ring.size, problem.seq_len, problem.head_dim
        return *sizes, problem.dtype, problem.direction


def specs(on: Fleet, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Returns the specs of all points, as plain data. Short runs vary more and cost less, so each
    point of a problem gets as many turns as take about ``seconds``."""
    found = []
    for ring, length, heads, dim, dtype, direction in PROBLEMS:
        turns = MOST_TURNS
        for at, (partitions, transports) in enumerate(STRATEGIES[ring].items()):
            spec: dict[str, Any] = {
                "version": 1,
                "name": f"prediction-{ring}-{length}-{at}",
                "kind": "latency",
                "ring": {"size": ring, "device": "cpu"},
                "problem": {
                    "seq_len": length, "heads": heads, "head_dim": dim, "dtype": dtype,
                    "direction": direction,
                },
                "strategy": {"partition": list(partitions), "transport": list(transports)},
                "measure": {
                    "warmup": 1, "repeats": repeats, "replicas": turns, "baseline": None,
                },
            }  # fmt: skip
            if at == 0:
                usual = statistics.median(
                    trial.predicted.time_ms / 1e3
                    for trial in build(parse(json.dumps(spec)), on).trials
                    if trial.predicted
                )
                turns = min(max(round(seconds / repeats / usual), LEAST_TURNS), MOST_TURNS)
            spec["measure"]["replicas"] = turns
            found.append(spec)
    return found


def measure(into: Path, given: list[dict[str, Any]]) -> None:
    """Appends a line per trial to ``into``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for at, spec in enumerate(given):
            print(f"{at + 1} of {len(given)}: {spec['name']}", file=sys.stderr, flush=True)
            (folder / "spec.json").write_text(json.dumps(spec))
            words = [sys.executable, "-m", "ringray", "run", str(folder / "spec.json")]
            words += ["--no-tracking", "--store", str(folder / "store.db"), "--json", str(into)]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def points(lines: list[dict[str, Any]], on: Fleet) -> list[Point]:
    """Returns the measured points with their predictions on ``on``."""
    of_point: dict[TrialConfig, list[dict[str, float]]] = {}
    for line in lines:
        if line["status"] != "ok":
            raise SystemExit(f"{line['name']}: {line['status']}, {line['reason']}")
        config = TrialConfig.from_dict(line["config"]).changed(replica=0)
        of_point.setdefault(config, []).append(line["metrics"])
    found = []
    for config, turns in of_point.items():
        cost, one = cost_model.predict(default_config(config), on), turns[0]
        found.append(
            Point(
                config, tuple(turn["median_ms"] for turn in turns), cost.time_ms,
                one["peak_memory_bytes"], cost.peak_memory_bytes,
                int(one["sent_bytes"]), cost.sent_bytes,
            )
        )  # fmt: skip
    return found


def figures(found: list[Point]) -> dict[str, float]:
    """Returns the errors over all points, and how often the choice by prediction is as good as the
    best; beside it how often the fastest of one turn is, which is what a measurement finds."""
    errors = np.abs([one.error for one in found])
    memory = np.abs([one.predicted_memory / one.memory - 1 for one in found])
    races = [some for some in by_problem(found).values() if len(some) > 1]
    won = [is_close(chosen(some), some) for some in races]
    measured = [
        is_close(min(some, key=lambda one: one.turns[turn]), some)
        for some in races
        for turn in range(len(some[0].turns))
    ]
    return {
        "points": len(found),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
        "median_memory_error": float(np.median(memory)),
        "worst_memory_error": float(np.max(memory)),
        "bytes_exact": float(np.mean([one.sent == one.predicted_sent for one in found])),
        "problems": len(races),
        "winner": float(np.mean(won)),
        "winner_of_one_turn": float(np.mean(measured)),
    }


def by_problem(found: list[Point]) -> dict[tuple[Any, ...], list[Point]]:
    """Returns the points of each problem, a ring of one size among its facts."""
    problems: dict[tuple[Any, ...], list[Point]] = {}
    for one in found:
        problems.setdefault(one.problem, []).append(one)
    return problems


def chosen(some: list[Point]) -> Point:
    """Returns the point with the least predicted time."""
    return min(some, key=lambda one: one.predicted_ms)


def is_close(one: Point, some: list[Point]) -> bool:
    """Returns whether a point is about as fast as the fastest of ``some``."""
    return one.ms <= min(other.ms for other in some) * (1 + CLOSE)


def show(found: list[Point]) -> None:
    """Prints all points, and what was chosen for each problem."""
    for problem, some in by_problem(found).items():
        ring, length, dim, dtype, direction = problem
        print(f"\nring of {ring}, {length:,} tokens, head dim {dim}, {dtype}, {direction}")
        best = min(one.ms for one in some)
        for one in sorted(some, key=lambda one: one.ms):
            strategy = one.config.strategy
            mark = "  chosen" if one is chosen(some) and len(some) > 1 else ""
            print(
                f"  {strategy.partition:13}{strategy.transport:15}{one.ms:9.1f} ms"
                f"{one.predicted_ms:9.1f} predicted {one.error:+7.1%}   memory "
                f"{one.predicted_memory / one.memory - 1:+6.1%}   {one.ms / best - 1:+6.1%}{mark}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", metavar="F", help="JSON lines of `ringray run`")
    parser.add_argument("--repeats", type=int, default=5, help="runs of a point in each turn")
    parser.add_argument("--seconds", type=float, default=4.0, help="runs of a point in all turns")
    parser.add_argument("--json", metavar="F", help="write points and figures to F")
    arguments = parser.parse_args()
    if calibration.find()[0] is None:
        words = [sys.executable, "-m", "ringray", "calibrate", "--device", "cpu"]
        subprocess.run(words, check=True)
    on = calibration.fleet(LOCAL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments.measured or f"{folder}/measured.jsonl")
        if not path.exists():
            measure(path, specs(on, arguments.repeats, arguments.seconds))
        found = points([json.loads(line) for line in path.read_text().splitlines()], on)
    show(found)
    reached = figures(found)
    print()
    for name, value in reached.items():
        print(f"{name:20} {value:.3g}" if name.endswith("s") else f"{name:20} {value:.1%}")
    print(f"{'load':20} {os.getloadavg()[0]:.1f}")
    if arguments.json:
        rows = [one._asdict() | {"config": one.config.as_dict()} for one in found]
        Path(arguments.json).write_text(json.dumps({"figures": reached, "points": rows}, indent=1))


if __name__ == "__main__":
    main()
