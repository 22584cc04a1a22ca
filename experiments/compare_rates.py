"""How often `ringray compare` sees a change where there is none, and how often it finds one.

    for run in $(seq 20); do
        ringray run experiments/compare.yaml --store /tmp/$run.db --json runs/$run.jsonl
    done
    python experiments/compare_rates.py runs/*.jsonl

Each file is one run of a sweep; files are in the order of measurement. Two runs are compared as
they are (A against A), and with the times of one made longer by 5%. With `--together 4` a side is
four runs that alternate with those of the other side; with `--replicas 5` it is five replicas drawn
from those of all runs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ringray.lab.report.comparison import ComparedSide, Comparison, compare
from ringray.lab.store import jsonl
from ringray.lab.trial.outcome import TrialRow

TIMES = {"ms", "median_ms", "ratio"}
WORSE = {"slower", "worse"}


def slower(row: TrialRow, factor: float) -> TrialRow:
    """Returns a trial whose times are longer."""
    metrics = {
        name: value * (factor if name in TIMES else 1) for name, value in row.metrics.items()
    }
    samples = {
        name: [one * (factor if name in TIMES else 1) for one in values]
        for name, values in row.samples.items()
    }
    return replace(row, metrics=metrics, samples=samples)


def pairs(
    runs: Sequence[list[TrialRow]], together: int, count: int
) -> Iterator[tuple[list[TrialRow], list[TrialRow]]]:
    """Yields both sides of comparisons: runs in their order, in turns."""
    draw = random.Random(0)
    for _ in range(count):
        chosen = sorted(draw.sample(range(len(runs)), 2 * together))
        sides = [[row for at in chosen[one::2] for row in runs[at]] for one in (0, 1)]
        yield (sides[0], sides[1]) if draw.random() < 0.5 else (sides[1], sides[0])


def drawn(
    runs: Sequence[list[TrialRow]], replicas: int, count: int
) -> Iterator[tuple[list[TrialRow], list[TrialRow]]]:
    """Yields both sides of comparisons: replicas of any run, each with all of its points."""
    turns: dict[tuple[int, int], list[TrialRow]] = {}
    for at, run in enumerate(runs):
        for row in run:
            turns.setdefault((at, row.config["replica"]), []).append(replace(row, ended=None))
    draw, known = random.Random(0), list(turns.values())
    for _ in range(count):
        chosen = draw.sample(known, 2 * replicas)
        yield (
            [row for one in chosen[::2] for row in one],
            [row for one in chosen[1::2] for row in one],
        )


def found(result: Comparison) -> tuple[bool, bool, bool]:
    """Tells whether B is slower as a whole, at a point, and whether anything seems to differ."""
    points = {one.verdict for one in result.points}
    return (
        result.verdict in WORSE,
        bool(points & WORSE),
        not {result.verdict, *points} <= {"equal", "not decided"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="rates of false alarms and of findings")
    parser.add_argument("runs", nargs="+", type=Path, help="JSON Lines, a file for each run")
    parser.add_argument("--metric", default="median_ms")
    parser.add_argument("--together", type=int, default=1, help="runs of a side")
    parser.add_argument("--replicas", type=int, help="replicas of a side")
    parser.add_argument("--repetitions", type=int, default=200)
    given = parser.parse_args()
    runs = [[row for _, row in jsonl.read(path)] for path in given.runs]
    unit = "replicas" if given.replicas else "runs"
    count = given.replicas or given.together
    print(f"{len(runs)} runs, {count} {unit} a side, {given.metric}")
    for factor in (1.0, 1.05):
        results = []
        for a, b in (drawn if given.replicas else pairs)(runs, count, given.repetitions):
            changed = [slower(row, factor) for row in b]
            first, second = (ComparedSide("", "", "", {}, rows) for rows in (a, changed))
            results.append(compare(first, second, given.metric))
        rates = [sum(one) / len(results) for one in zip(*map(found, results), strict=True)]
        either = sum(any(found(one)[:2]) for one in results) / len(results)
        ratios = sorted(one.overall.ratio / factor for one in results)
        print(
            f"x{factor}: slower as a whole {rates[0]:.1%}, at a point {rates[1]:.1%}, either "
            f"{either:.1%}; anything {rates[2]:.1%}; ratio of 90%: {ratios[len(ratios) // 20]:.3f} "
            f"to {ratios[-1 - len(ratios) // 20]:.3f}"
        )


if __name__ == "__main__":
    main()
