"""The deadline of a trial: a multiple of its predicted time.

The factor allows for a wrong prediction, the floor for imports, compilers and a busy machine, which
no plan knows; ``limits.trial_timeout`` is the upper bound.
"""

from __future__ import annotations

from ringray.lab.kinds import KINDS
from ringray.lab.plan.plan import Trial
from ringray.lab.spec.model import LimitsSection
from ringray.lab.trial.config import TrialConfig

FLOOR_S = 60.0
FACTOR = 50.0


def seconds(trial: Trial, config: TrialConfig, limits: LimitsSection) -> float:
    """Returns the longest time from the dispatch of ``trial`` to its end, in seconds."""
    kind = KINDS[trial.kind]
    if trial.predicted is None or kind.ranks_alone:  # the time of compilers is unknown
        return limits.trial_timeout
    once = trial.predicted.time_ms / 1e3
    # One process computes the whole problem for the baseline; an oracle does so in fp64.
    beside = config.ring_size * (kind.oracle_passes or bool(config.baseline))
    runs = config.warmup + config.repeats + 1
    return min(limits.trial_timeout, max(FLOOR_S, FACTOR * once * runs * (1 + beside)))
