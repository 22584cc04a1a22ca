"""Rings over four hosts with shaped links on this machine, measured beside their predictions.

    sudo python experiments/multihost.py

Runs the specs of experiments/multihost in turns on `cluster/multihost.py` and prints ratios, each
of two trials of one turn: the median over turns, their range, and the ratio of the predictions.
Ends with 1 if a median is further from its prediction than its bound.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).with_suffix("")
CLUSTER = HERE.parents[1] / "cluster" / "multihost.py"
RATE = "100mbit"  # that host.yaml describes
SPECS = {4: ("apart", "together"), 2: ("links",)}  # by CPUs of a host
Key = tuple[str, str, str]  # name of the spec, order and transport


class Figure(NamedTuple):
    """The time of one trial over that of another. ``bound``: of measured over predicted ratio."""

    title: str
    one: Key
    other: Key
    bound: float


FIGURES = (
    Figure("ring of 4, on 4 hosts : on 1", ("apart", "topology", "ring"),
           ("together", "topology", "ring"), 1.10),
    Figure("ring of 8, shuffled : topology", ("links", "shuffled", "ring"),
           ("links", "topology", "ring"), 1.15),
    Figure("ring : double-ring, topology", ("links", "topology", "ring"),
           ("links", "topology", "double-ring:2"), 1.15),
)  # fmt: skip


def measure(turns: int, folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of all trials, turn by turn; SystemExit if a command fails."""
    lines = folder / "lines.jsonl"
    for cpus, names in SPECS.items():
        commands = [
            [sys.executable, "-m", "ringray", "run", str(HERE / f"{name}.yaml"), "--no-tracking",
             "--store", str(folder / f"{name}-{turn}.db"), "--json", str(lines)]
            for turn in range(turns) for name in names
        ]  # fmt: skip
        words = [sys.executable, str(CLUSTER), "--hosts=4", f"--cpus={cpus}", f"--rate={RATE}"]
        script = " && ".join(shlex.join(command) for command in commands)
        done = subprocess.run(
            [*words, "--", "sh", "-c", script], cwd=HERE.parents[1], stdout=sys.stderr,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.returncode)
    return [json.loads(line) for line in lines.read_text().splitlines()]


def times(lines: list[dict[str, Any]]) -> dict[Key, list[tuple[float, float]]]:
    """Returns measured and predicted ms of each trial, by turn."""
    found: dict[Key, list[tuple[float, float]]] = {}
    for line in lines:
        config = line["config"]
        key = line["name"], config.get("order", "topology"), config["transport"]
        both = line["metrics"]["median_ms"], line["predicted"]["time_ms"]
        found.setdefault(key, []).append(both)
    return found


def show(found: dict[Key, list[tuple[float, float]]]) -> bool:
    """Prints all figures; returns whether each is within its bound."""
    print(f"\n{'links of ' + RATE:34} measured  lowest  highest  predicted  measured : predicted")
    good = True
    for one in FIGURES:
        pairs = list(zip(found[one.one], found[one.other], strict=True))
        ratios = [mine[0] / other[0] for mine, other in pairs]
        predicted = pairs[0][0][1] / pairs[0][1][1]
        measured = statistics.median(ratios)
        off = measured / predicted
        # A ring over hosts may be as fast as it likes.
        within = (1 / one.bound <= off or one is FIGURES[0]) and off <= one.bound
        good &= within
        print(
            f"{one.title:34} {measured:8.2f}{min(ratios):8.2f}{max(ratios):9.2f}{predicted:11.2f}"
            f"{off:12.2f}{'' if within else f', beyond {one.bound:.2f}'}"
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as folder:
        return 0 if show(times(measure(turns, Path(folder)))) else 1


if __name__ == "__main__":
    sys.exit(main())
