"""Pruning by prediction: points beyond the memory that there is, and points of a search that
another point of their problem surely beats. ``--all`` measures both.

Predictions err, so each rule leaves a margin. Imports neither torch nor ray.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ringray.base import units
from ringray.lab.plan import problems
from ringray.lab.plan.pruning import Reason
from ringray.lab.plan.trial import Trial
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import RANKS, Fleet
from ringray.lab.search import METHODS
from ringray.lab.search.base import LEAST
from ringray.lab.specs.model import Spec
from ringray.lab.trial import training
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.metrics import METRICS

# Memory beyond which a point is pruned, over what there is. Passes with a causal mask or none were
# predicted within 6% of the measured peak, all others within a quarter.
_SURE, _ROUGH = 1.1, 1.3
# The least time of a beaten point over the most time of the best one. In simulated searches with
# predictions that err by a quarter and admit 3%, 1.1 loses the best point in 11% and 1.5 in 1%.
_APART = 1.5
BEATEN = Reason(
    "search.method",
    "predicted to be slower than another point of its problem, by more than predictions err",
)


class MemoryBudget(NamedTuple):
    """Memory that a rank may use, in bytes: the ``field`` to change, and ``owner``: whose it is."""

    size: float
    field: str
    owner: str = ""

    def __str__(self) -> str:
        return f"{units.memory(self.size)}{self.owner}"


class Host(NamedTuple):
    """The machine or device of ranks: its memory in bytes, which at most ``ranks`` share."""

    memory: float
    name: str
    ranks: int


def host(on: Fleet | None, machine: int | None) -> Host | None:
    """Returns the host of the ranks of ``on``, else this one with ``machine`` bytes for CPU ranks;
    None if its memory is not known."""
    if on is not None:
        memory, most = on.hardware.memory, on.per_node if on.shares_cores else 1
        return None if memory is None else Host(memory, on.hardware.title, most)
    return None if machine is None else Host(machine, "this machine", RANKS)


def memory_budget(spec: Spec, config: TrialConfig, host: Host | None) -> MemoryBudget | None:
    """Returns the memory that a rank may use, None if that is not known."""
    budgets = []
    if spec.limits.rank_memory is not None:
        budgets.append(MemoryBudget(spec.limits.rank_memory, "limits.rank_memory"))
    if host is not None:
        alone = spec.trial_kind.independent_ranks
        ranks = min(host.ranks, spec.sweep("ring", "size")[0] if alone else config.ring.size)
        owner = f" of {host.name}" + (f" for each of {ranks} ranks" if ranks > 1 else "")
        budgets.append(MemoryBudget(host.memory / ranks, "problem.seq_len", owner))
    return min(budgets, default=None)


def too_large(
    spec: Spec,
    configs: Sequence[TrialConfig],
    costs: Sequence[Cost | None],
    reasons: Sequence[Reason | None],
    host: Host | None,
) -> tuple[list[Reason | None], str]:
    """Returns the ``reasons`` with those of points that surely lack memory, and a warning of those
    that may lack it, or ""."""
    pruned, close = list(reasons), []
    for i, (config, cost) in enumerate(zip(configs, costs, strict=True)):
        if cost is None or (there := memory_budget(spec, config, host)) is None:
            continue
        peak = cost.peak_memory_bytes
        if peak <= there.size:
            continue
        if peak > _margin(config) * there.size:
            text = f"predicted {units.memory(peak)} per rank, more than {there}"
            pruned[i] = Reason(there.field, text)
        else:
            close.append((peak, there))
    if not close:
        return pruned, ""
    peak, there = max(close)
    return pruned, (
        f"warning: {units.plural(len(close), 'point')} may run out of memory: up to "
        f"{units.memory(peak)} per rank are predicted, more than {there}, but not by more than "
        "predictions err"
    )


def _margin(config: TrialConfig) -> float:
    if config.training is not None:
        config = training.ring_config(config, training.from_config(config)[1])
    problem, gathers = config.problem, config.exchange.heads_at_once is not None
    sure = problem.new_tokens is None and problem.mask.plain and not gathers
    return _SURE if sure else _ROUGH


def shares(spec: Spec, trials: Sequence[Trial]) -> list[float]:
    """Returns about the share of the runs of each trial that a search among them spends."""
    method = METHODS[spec.search.method]
    if not (method.extreme or "budget" in method.options):
        return [1.0] * len(trials)

    def share(points: int) -> float:
        if method.extreme:  # halves what lies between
            return min(1.0, (1 + math.log2(points)) / points)
        return min(1.0, max(spec.search.share, LEAST / points))

    every = problems.studies(trials)
    of_trial = {trial.index: share(len(study)) for study in every for trial in study}
    return [of_trial[trial.index] for trial in trials]


def beaten(costs: Sequence[Cost], keep: Sequence[int] = ()) -> list[int]:
    """Returns the numbers of the points that another one surely beats, but for those to ``keep``
    and the fastest ``LEAST``."""
    order = sorted(range(len(costs)), key=lambda i: costs[i].time_ms)
    most = _APART * min((cost.high_ms for cost in costs), default=0.0)
    return [i for i in order[LEAST:] if costs[i].low_ms > most and i not in keep]


def without_beaten(spec: Spec, trials: tuple[Trial, ...], cores: int | None) -> tuple[Trial, ...]:
    """Returns the trials; in a search for the shortest time the beaten ones are pruned, but never
    the default. A method that measures every point has none, and so have rings that need more than
    the ``cores`` of their machine: how their ranks wait for each other changes from run to run."""
    fields = {METRICS[name].predicted for name in spec.search.objectives}
    if METHODS[spec.search.method].exhaustive or fields != {"time_ms"}:
        return trials
    lost = set()
    for group in problems.studies([trial for trial in trials if trial.pruned is None]):
        rings = [trial.config.ring for trial in group]
        if cores and any(ring.size * ring.threads > cores for ring in rings):
            continue
        usual = problems.defaults(group)
        keep = [i for i, trial in enumerate(group) if trial in usual]
        costs = [trial.predicted for trial in group if trial.predicted is not None]
        lost |= {group[i].key for i in beaten(costs, keep)}
    return tuple(replace(trial, pruned=BEATEN) if trial.key in lost else trial for trial in trials)
