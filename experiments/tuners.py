"""Comparison of search methods on recorded full measurements of the same points.

    ringray run experiments/tuners.yaml && python experiments/tuners.py tuners
    python experiments/tuners.py experiments/tuners.yaml --simulated 0.2

A method is told recorded runs of each point it asks for, in an order that is drawn anew for each of
several tries. The first of them, --repeats, are a full measurement; the others, which no method is
told, judge its choice by their medians. ``grid`` shows what full measurements of every point find.
Points that their prediction rules out are
left out, but for --all; the share of runs is of all points. Simulated points err by 20% from their
prediction on a calibrated machine with a core for each rank, and their runs spread by 10%.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import replace

from ringray.lab.driver.schedule import Schedule
from ringray.lab.opening import open_store
from ringray.lab.plan.forecast import BEATEN
from ringray.lab.plan.plan import Plan, build
from ringray.lab.plan.problems import studies
from ringray.lab.predict.hardware import Fleet, cpu
from ringray.lab.search import METHODS
from ringray.lab.specs import model as specs
from ringray.lab.specs.sections import SearchSection
from ringray.lab.sweeps import stored_spec
from ringray.lab.trial.outcome import Outcome

TRIES = 25
NEAR = 0.05  # loss
SPREAD = 0.1  # of simulated runs
CALIBRATED = {"measured": "simulated", "spread": 0.05}

Runs = dict[int, list[float]]  # milliseconds, by the number of the trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", help="name or digest of a tuning sweep that measured all points")
    parser.add_argument("--store", help="store file")
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=45, help="runs of a full measurement")
    parser.add_argument("--all", action="store_true", help="leave no point out")
    parser.add_argument("--simulated", type=float, metavar="E", help="error; sweep is a spec then")
    arguments = parser.parse_args()
    fleet, runs = None, {}
    if arguments.simulated is not None:
        fleet = cpu(64)
        fleet = replace(fleet, hardware=fleet.hardware.model_copy(update=CALIBRATED))
        plan = build(specs.load(arguments.sweep), fleet)
    else:
        with open_store(arguments.store) as store:
            sweep = store.find(arguments.sweep)
            rows = [row for row in store.trials(sweep.digest) if row.status == "ok"]
            runs = {row.index: row.samples["ms"] for row in rows}
        plan = build(stored_spec(sweep))
    points = len(plan.runnable)
    print(
        f"{plan.spec.name}: {points} points, {TRIES} tries, {arguments.repeats} repeats, budget "
        f"{arguments.budget:.0%}"
    )
    print(
        "method    problem                       loss, median of tries   worst   within 5%   spent"
    )
    measure = plan.spec.measure.model_copy(update={"repeats": arguments.repeats})
    plan = replace(plan, spec=plan.spec.model_copy(update={"measure": measure}))
    for method in [name for name, one in METHODS.items() if not one.extreme]:
        asking = _asking(plan, fleet, method, arguments.budget, everything=arguments.all)
        lost = sum(trial.pruned == BEATEN for trial in asking.trials)
        print(f"{method:9} {lost} of {points} points left out by their prediction")
        tries = [
            _play(asking, runs or _simulated(plan, arguments.simulated, seed), seed)
            for seed in range(TRIES)
        ]
        for at, (label, _, _) in enumerate(tries[0]):
            losses = sorted(one[at][1] for one in tries)
            spent = statistics.median(one[at][2] for one in tries)
            near = sum(loss <= NEAR for loss in losses)
            print(
                f"{method:9} {label:30} {statistics.median(losses):8.1%} {losses[-1]:17.1%} "
                f"{near:6} of {TRIES} {spent:7.0%}"
            )


def _simulated(plan: Plan, error: float, seed: int) -> Runs:
    """Returns runs whose medians err from the plan by a share."""
    draw = random.Random(seed)
    found = {}
    for trial in plan.trials:
        assert trial.predicted is not None
        median = trial.predicted.time_ms * draw.lognormvariate(0, error)
        found[trial.index] = [
            median * draw.lognormvariate(0, SPREAD) for _ in range(4 * plan.spec.measure.repeats)
        ]
    return found


def _asking(
    plan: Plan, fleet: Fleet | None, method: str, budget: float, *, everything: bool
) -> Plan:
    """Returns the plan that searches by ``method``."""
    takes = METHODS[method].options
    search = SearchSection(
        method=method,
        budget=budget if "budget" in takes else None,
        seed=0 if "seed" in takes else None,
    )
    spec = plan.spec.model_copy(update={"search": search})
    return build(spec, fleet, everything=everything)


def _play(plan: Plan, runs: Runs, seed: int) -> list[tuple[str, float, float]]:
    """For each study: its problem, what its choice loses on the best, and the share of runs."""
    draw = random.Random(seed)
    search = plan.spec.search
    if search.seed is not None:
        search = search.model_copy(update={"seed": seed})
    asking = replace(plan, spec=plan.spec.model_copy(update={"search": search}))
    schedule = Schedule(asking, {t.key: "" for t in plan.runnable if t.index not in runs}, {})
    shuffled = {at: draw.sample(ms, len(ms)) for at, ms in runs.items()}
    measure, visits = plan.spec.measure, dict.fromkeys(runs, 0)
    while (work := schedule.next()) is not None:
        at = work.trial.index
        ms = shuffled[at][: work.repeats]
        visits[at] += 1
        schedule.tell(work, Outcome("ok", None, {"median_ms": statistics.median(ms)}, {"ms": ms}))
    found = []
    recorded = studies([trial for trial in plan.trials if trial.index in runs])
    for study, every in zip(schedule.found(), recorded, strict=True):
        untold = {trial.key: shuffled[trial.index][measure.repeats :] for trial in every}
        medians = {key: statistics.median(ms) for key, ms in untold.items()}
        assert study.best is not None
        loss = medians[study.best] / min(medians.values()) - 1
        spent = study.runs + measure.warmup * sum(visits[trial.index] for trial in every)
        config = study.trials[0].config
        label = f"ring {config.ring.size}, {config.problem.seq_len} {config.problem.direction}"
        found.append((label, loss, spent / (len(every) * (measure.warmup + measure.repeats))))
    return found


if __name__ == "__main__":
    main()
