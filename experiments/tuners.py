"""Comparison of search methods on recorded full measurements of the same points.

    ringray run experiments/tuners.yaml && python experiments/tuners.py tuners

A method is told the recorded runs of each point it asks for, in an order that is drawn anew for
each of several tries; what it chooses is judged by the median of all runs of that point.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from ringray.lab.cli.run import stored_spec
from ringray.lab.cli.store import open_store
from ringray.lab.driver.schedule import Schedule
from ringray.lab.plan.plan import Plan, build
from ringray.lab.search import METHODS
from ringray.lab.trial.outcome import Outcome

if TYPE_CHECKING:
    from ringray.lab.trial.outcome import TrialRow

TRIES = 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", help="name or digest of a tuning sweep that measured all points")
    parser.add_argument("--store", help="store file")
    parser.add_argument("--budget", type=float, default=0.25)
    arguments = parser.parse_args()
    with open_store(arguments.store) as store:
        sweep = store.find(arguments.sweep)
        rows = {row.key: row for row in store.trials(sweep.digest) if row.status == "ok"}
    plan = build(stored_spec(sweep))
    print(f"{plan.spec.name}: {len(rows)} points, {TRIES} tries, budget {arguments.budget:.0%}")
    print("method    problem                       loss, median of tries   worst   runs spent")
    for method in (name for name, one in METHODS.items() if not one.exhaustive):
        tries = [_play(plan, rows, method, arguments.budget, seed) for seed in range(TRIES)]
        for at, (label, _, _) in enumerate(tries[0]):
            losses = sorted(one[at][1] for one in tries)
            spent = statistics.median(one[at][2] for one in tries)
            print(
                f"{method:9} {label:30} {statistics.median(losses):8.1%} {losses[-1]:17.1%} "
                f"{spent:12.0%}"
            )


def _play(
    plan: Plan, rows: dict[str, TrialRow], method: str, budget: float, seed: int
) -> list[tuple[str, float, float]]:
    """For each study: its problem, what its choice loses on the best, and the share of runs."""
    draw = random.Random(seed)
    search = plan.spec.search.model_copy(
        update={
            "method": method,
            "budget": budget,
            "seed": seed if "seed" in METHODS[method].options else None,
        }
    )
    asking = replace(plan, spec=plan.spec.model_copy(update={"search": search}))
    schedule = Schedule(asking, {t.key: "" for t in plan.runnable if t.key not in rows}, {})
    shuffled = {
        key: draw.sample(row.samples["ms"], len(row.samples["ms"])) for key, row in rows.items()
    }
    measure, visits = plan.spec.measure, dict.fromkeys(rows, 0)
    while (work := schedule.next()) is not None:
        key = work.trial.key
        ms = shuffled[key][: work.repeats]
        visits[key] += 1
        metrics = {**rows[key].metrics, "median_ms": statistics.median(ms)}
        schedule.tell(work, Outcome("ok", None, metrics, {"ms": ms}))
    found = []
    for study in schedule.found():
        keys = [trial.key for trial in study.trials]
        least = min(rows[key].metrics["median_ms"] for key in keys)
        assert study.best is not None
        loss = rows[study.best].metrics["median_ms"] / least - 1
        spent = study.runs + measure.warmup * sum(visits[key] for key in keys)
        config = study.trials[0].config
        label = f"{config.seq_len} {config.dtype} {config.direction}"
        found.append((label, loss, spent / (len(keys) * (measure.warmup + measure.repeats))))
    return found


if __name__ == "__main__":
    main()
