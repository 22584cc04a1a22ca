"""Table 5 of the ring attention paper: more trajectories in context act better.

    python experiments/paper/table5_in_context_rl.py  # 20 minutes, 2 cores

Printed are the average returns on ExoRL with 32 and with 128 trajectories in context, the latter
out of memory without a ring. Here a mass on a line is steered to a goal that only trajectories
tell, 4 or 16 of them, in the same memory per rank; ours are shares of the return that can be had,
means over seeds.
"""

from __future__ import annotations

import math
import statistics

from comparison import Row, measured, show

from ringray.lab.trial.metrics import SCORE

T_95 = 2.776  # Student's t of 5 seeds


def rows() -> list[Row]:
    """Returns the cells, and the gain from seeds that differ in the context alone."""
    few = measured("table5_in_context_rl_few")
    many = measured("table5_in_context_rl")
    ring = [trial for trial in many if trial.config["ring_size"] > 1]
    before, after = ([one.metrics[SCORE] for one in some] for some in (few, ring))
    alone = next(trial for trial in many if trial.config["ring_size"] == 1)
    gains = [b - a for a, b in zip(before, after, strict=True)]
    width = T_95 * statistics.stdev(gains) / math.sqrt(len(gains))
    return [
        Row("few (4), one rank", 111.13, 100 * statistics.mean(before), listed(before)),
        Row("many (16), one rank", None, math.nan, f"{alone.status}; printed: oom"),
        Row("many (16), ring of 4", 113.66, 100 * statistics.mean(after), listed(after)),
        Row("gain", 2.53, 100 * statistics.mean(gains), f"± {100 * width:.1f} (95%)"),
    ]


def listed(scores: list[float]) -> str:
    """Returns the scores of the seeds."""
    return ", ".join(f"{100 * score:.0f}" for score in scores)


if __name__ == "__main__":
    show("Table 5: return, many trajectories against few", rows(), "%; printed: ExoRL's average")
