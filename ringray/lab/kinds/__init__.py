"""The kinds of experiment: what one trial does on its ring.

base         what a rank is given, and the passes that are measured
latency      the time of a pass, beside a baseline
overlap      how much communication is hidden
correctness  output and gradients against an fp64 oracle
kernel_tune  one rank's attention under each way to cut it
decode       the time of new tokens, with a context that stays sharded
train        steps of training a decoder on a mesh of ranks; max-context: how long they may be;
             retrieval, in-context-rl: training on a task, and an examination

To add one, write ``ringray/lab/kinds/<name>.py`` beside the others with a function ``run(config,
context)`` that returns a ``RankReport``, and give it a line in ``KINDS``. The modules need torch,
so the table holds their paths: specs and plans hand out its objects without importing any of them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ringray.lab.trial.metrics import Group

if TYPE_CHECKING:  # which need torch
    from ringray.lab.kinds.base import RankContext
    from ringray.lab.trial.config import TrialConfig
    from ringray.lab.trial.measurement import RankReport

_TIMED: tuple[Group, ...] = ("time", "traffic", "memory", "baseline")
_TRAINED: tuple[Group, ...] = ("time", "traffic", "memory", "training")


@dataclass(frozen=True)
class TrialKind:
    """A kind of experiment.

    ``measures``: the groups of metrics that its trials are compared by. ``searchable``: trials are
    timed run by run, so a search may return to one. ``tunes``: the tuned choice that its best
    points become, "" for none. ``independent_ranks``: ranks measure different points side by side,
    as rings of one. ``decodes``: a trial is a step of new tokens, not a pass. ``oracle_passes``:
    the cost of its fp64 oracle, in passes of the whole problem by one process; 0 for none.
    ``trains``: a trial is a training, whose repeats are steps. ``bisects_length``: the longest one
    that works is searched, by bisection. ``task``: the data that it trains on and is examined with
    (``TASKS`` of ``ringray.training.tasks``), "" for a corpus.
    """

    name: str
    module: str
    measures: tuple[Group, ...]
    searchable: bool = False
    tunes: Literal["strategy", "kernel", ""] = ""
    independent_ranks: bool = False
    decodes: bool = False
    oracle_passes: int = 0
    trains: bool = False
    bisects_length: bool = False
    task: str = ""

    def run(self, config: TrialConfig, context: RankContext) -> RankReport:
        """Runs one trial on a rank; every rank of the ring calls it at the same time."""
        report: RankReport = importlib.import_module(self.module).run(config, context)
        return report


_IN = "ringray.lab.kinds."
_ALL = (
    TrialKind("correctness", f"{_IN}correctness", ("error", "traffic"), oracle_passes=5),
    TrialKind("latency", f"{_IN}latency", _TIMED, searchable=True),
    TrialKind("overlap", f"{_IN}overlap", (*_TIMED, "overlap")),
    TrialKind("decode", f"{_IN}decode", _TIMED, searchable=True, decodes=True),
    TrialKind("train", f"{_IN}train", _TRAINED, trains=True),
    TrialKind("max-context", f"{_IN}train", _TRAINED, trains=True, bisects_length=True),
    TrialKind("retrieval", f"{_IN}train", _TRAINED, trains=True, task="lines"),
    TrialKind("in-context-rl", f"{_IN}train", _TRAINED, trains=True, task="point-mass"),
    TrialKind("strategy-tune", f"{_IN}latency", _TIMED, searchable=True, tunes="strategy"),
    TrialKind(
        "kernel-tune",
        f"{_IN}kernel_tune",
        _TIMED,
        searchable=True,
        tunes="kernel",
        independent_ranks=True,
    ),
)
KINDS = {kind.name: kind for kind in _ALL}
