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
so the table holds their paths: specs and plans read the table without importing any of them.
"""

from dataclasses import dataclass
from typing import Literal

from ringray.lab.trial.metrics import Group

_TIMED: tuple[Group, ...] = ("time", "traffic", "memory", "baseline")
_TRAINED: tuple[Group, ...] = ("time", "traffic", "memory", "training")


@dataclass(frozen=True)
class TrialKind:
    """A kind of experiment.

    ``measures``: the groups of metrics that its trials are compared by. ``searchable``: trials are
    timed run by run, so a search may return to one. ``tunes``: the tuned choice that its best
    points become, "" for none. ``ranks_alone``: ranks measure different points side by side, as
    rings of one. ``decodes``: a trial is a step of new tokens, not a pass. ``oracle_passes``: the
    cost of its fp64 oracle, in passes of the whole problem by one process; 0 for none. ``trains``:
    a trial is a training, whose repeats are steps. ``reaches``: the longest one that works is
    searched, by bisection. ``task``: the data that it trains on and is examined with (``TASKS`` of
    ``ringray.training.tasks``), "" for a corpus.
    """

    module: str
    measures: tuple[Group, ...]
    searchable: bool = False
    tunes: Literal["strategy", "kernel", ""] = ""
    ranks_alone: bool = False
    decodes: bool = False
    oracle_passes: int = 0
    trains: bool = False
    reaches: bool = False
    task: str = ""


KINDS: dict[str, TrialKind] = {
    "correctness": TrialKind(
        "ringray.lab.kinds.correctness", ("error", "traffic"), oracle_passes=5
    ),
    "latency": TrialKind("ringray.lab.kinds.latency", _TIMED, searchable=True),
    "overlap": TrialKind("ringray.lab.kinds.overlap", (*_TIMED, "overlap")),
    "decode": TrialKind("ringray.lab.kinds.decode", _TIMED, searchable=True, decodes=True),
    "train": TrialKind("ringray.lab.kinds.train", _TRAINED, trains=True),
    "max-context": TrialKind("ringray.lab.kinds.train", _TRAINED, trains=True, reaches=True),
    "retrieval": TrialKind("ringray.lab.kinds.train", _TRAINED, trains=True, task="lines"),
    "in-context-rl": TrialKind("ringray.lab.kinds.train", _TRAINED, trains=True, task="point-mass"),
    "strategy-tune": TrialKind(
        "ringray.lab.kinds.latency", _TIMED, searchable=True, tunes="strategy"
    ),
    "kernel-tune": TrialKind(
        "ringray.lab.kinds.kernel_tune", _TIMED, searchable=True, tunes="kernel", ranks_alone=True
    ),
}
