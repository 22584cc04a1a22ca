"""Figure 3 of the ring attention paper: retrieval at lengths that only a ring trains.

    python experiments/paper/figure3_retrieval.py  # half an hour, 2 cores

The paper draws accuracies and prints none: a model trained at 512k tokens on a ring answers at any
length, models trained at 16k and 100k fail beyond theirs. Here a tiny model is trained at 128
tokens on one rank and at 512 on a ring of 4, in the same memory per rank; heat maps by length and
depth are in MLflow (``scores``).
"""

from __future__ import annotations

import statistics

from comparison import Row, measured, show

from ringray.lab.report.figures.scores import by_length


def rows() -> list[Row]:
    """Returns accuracy by training and length."""
    found = []
    for name in ("figure3_retrieval_short", "figure3_retrieval"):
        for trial in measured(name):
            config = trial.config
            trained = f"trained at {config['seq_len']}, ring of {config['ring_size']}"
            if trial.status != "ok":
                found.append(Row(trained, None, float("nan"), str(trial.reason)))
            for length, scores in sorted(by_length(trial).items()):
                found.append(Row(f"{trained}: {length}", None, 100 * statistics.mean(scores)))
    return found


if __name__ == "__main__":
    show("Figure 3: values retrieved", rows(), "%")
