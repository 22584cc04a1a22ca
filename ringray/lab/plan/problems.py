"""Studies of a plan: the points of one problem on one size of ring, which a search compares."""

from __future__ import annotations

from collections.abc import Sequence

from ringray.lab.kinds import TrialKind
from ringray.lab.plan.expand import STRATEGY
from ringray.lab.plan.kernel_cuts import kernel_of
from ringray.lab.plan.trial import Trial
from ringray.tuning import table as tuned


def searched(kind: TrialKind) -> tuple[str, ...]:
    """Returns the config fields that are searched, not part of the problem."""
    if kind.bisects_length:
        return ("seq_len",)
    return (*STRATEGY, "threads") if kind.tunes else STRATEGY


def problem_of(trial: Trial) -> str:
    """Returns a key of the fields that are not searched; each kernel is a problem by itself."""
    fixed = {
        name: value
        for name, value in trial.config.as_dict().items()
        if name not in (*searched(trial.kind), "replica")
    }
    if trial.kind.independent_ranks:
        fixed["kernel"] = kernel_of(trial.config.strategy.blocks)
    return repr(fixed)


def studies(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Groups trials by their problem, in their order."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(problem_of(trial), []).append(trial)
    return list(groups.values())


def defaults(trials: Sequence[Trial]) -> list[Trial]:
    """Returns the points of a study that are taken where nothing is tuned, one for each number of
    threads and replica. Of Triton's kernels there is none: their defaults depend on the GPU."""
    cuts = {trial.config.strategy.blocks for trial in trials}
    if None not in cuts and (len(cuts) > 1 or trials[0].kind.independent_ranks):
        return []
    return [
        trial
        for trial in trials
        if (trial.config.strategy.blocks is None or None not in cuts)
        and all(
            vars(trial.config.strategy)[name] in (usual, "auto")
            for name, usual in tuned.DEFAULTS.items()
        )
    ]
