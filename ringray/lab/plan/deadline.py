"""How long a trial may take before it is given up: what the plan predicts, generously.

A guess of time can be wrong by a lot, a trial that hangs never ends: the factor forgives the one,
the floor what no plan knows (imports, compilers, a busy machine), and ``limits.trial_timeout`` is
the most in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringray.lab.kinds import KINDS

if TYPE_CHECKING:
    from ringray.lab.plan.plan import Trial
    from ringray.lab.spec.model import LimitsSection
    from ringray.lab.trial.config import TrialConfig

FLOOR_S = 60.0
FACTOR = 50.0


def seconds(trial: Trial, config: TrialConfig, limits: LimitsSection) -> float:
    """From the dispatch of ``trial`` to its end, measured as ``config`` says."""
    kind = KINDS[trial.kind]
    if trial.predicted is None or kind.ranks_alone:  # compilers take what they take
        return limits.trial_timeout
    once = trial.predicted.time_ms / 1e3
    # One process does the whole problem for the baseline; an oracle does so in fp64.
    beside = config.ring_size * (kind.oracle_passes or bool(config.baseline))
    runs = config.warmup + config.repeats + 1
    return min(limits.trial_timeout, max(FLOOR_S, FACTOR * once * runs * (1 + beside)))
