"""A planned trial: one point of a sweep with its prediction, or the reason why it never runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ringray.base import provenance
from ringray.lab.kinds import TrialKind
from ringray.lab.plan.pruning import Reason
from ringray.lab.predict.cost_model import Cost
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.outcome import Outcome, TrialRow


@dataclass(frozen=True)
class Trial:
    """One point of a sweep."""

    index: int

    #: Names it within its sweep.
    key: str

    kind: TrialKind
    config: TrialConfig

    #: Pruned trials have a prediction only if it is the reason.
    predicted: Cost | None

    #: Pruned trials never run.
    pruned: Reason | None

    #: Predicted seconds of all its runs, with those of its baseline or oracle.
    measuring_s: float = 0.0

    def point(self, described: dict[str, Any], chosen: Mapping[str, Any] | None = None) -> str:
        """Returns the digest of a measurement in the environment ``described``. ``chosen``: values
        of the fields that the config leaves open."""
        config = {"kind": self.kind.name, **self.config.as_dict(), **(chosen or {})}
        return provenance.point_digest(config, described)


def cost_dict(trial: Trial) -> dict[str, Any]:
    """Returns the predicted cost as plain data; empty for a pruned trial."""
    return dict(trial.predicted._asdict()) if trial.predicted else {}


def trial_dict(trial: Trial) -> dict[str, Any]:
    """Returns a trial as plain data, for ``ringray plan --json``."""
    return {
        "index": trial.index,
        "key": trial.key,
        "kind": trial.kind.name,
        "config": trial.config.as_dict(),
        "predicted": cost_dict(trial),
        "measuring_s": trial.measuring_s,
        "pruned": str(trial.pruned) if trial.pruned else None,
    }


def trial_row(trial: Trial, outcome: Outcome | TrialRow) -> TrialRow:
    """Returns the record of a trial and its outcome."""
    plan = trial.key, trial.index, trial.config.as_dict(), cost_dict(trial)
    return TrialRow(*plan, **{item.name: getattr(outcome, item.name) for item in fields(Outcome)})
