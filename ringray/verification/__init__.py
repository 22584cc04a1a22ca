"""``verify``: does a model that is split over ranks compute what one process computes?

The target runs on small batches in one process, in fp64 and in its own dtype, and on several ranks;
logits, losses and every gradient are compared by the error budget of the ring, and probes change
single tokens, labels and documents. In reading order:

target    what is verified: a file, or module:function, above an adapter
defaults  what a target does unless it says otherwise
adapters  ways to run a plain model on ranks, one file each
double    fp64 in place of fp32
observation  what one process computes of a batch
process   one process: it builds the model and runs batches
world     the processes of a target, their answers, errors and hangs
batches   what they run
compare   one batch computed by one process and by all ranks, and where the results part
dependence  which token changes which row
probes    what is tried
mistakes  which kind of mistake gives such numbers
verdict   what it came to
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch

from ringray.base.errors import unknown
from ringray.verification.probes import PROBES, Evidence, run_probes
from ringray.verification.target import DEFAULT, TargetError, importable_name, make_adapter
from ringray.verification.verdict import Finding, Verdict
from ringray.verification.world import INSIDE, HangError, Refused, World

__all__ = ["Finding", "HangError", "TargetError", "Verdict", "verify"]

_DEVICES = "cpu", "cuda"
_MOST = 64  # ranks


def verify(
    build: str | Callable[..., Any],
    *,
    ranks: int = 2,
    adapter: str | None = None,
    probes: Sequence[str] | None = None,
    device: str = "cpu",
    limit: float | None = None,
    view: TextIO | None = None,
) -> Verdict:
    """Compares a model that is split over ranks with the same model in one process.

    Each rank is a new process, which imports the target by its name; a program that calls this and
    has ``build`` itself does so below ``if __name__ == "__main__":``.

    Args:
        build: a function that returns the model, or (model, shard); or a Python file or
            ``module:function``. The target's other functions: ``ringray.verification.target``.
        ranks: processes of the ring, from 2 to 64.
        adapter: how a plain model runs on them, a name of ``ringray.verification.target.ADAPTERS``
            and its arguments (``ring:striped,hybrid:2``); None: our ring.
        probes: names of ``ringray.verification.probes.PROBES``; None: all.
        device: ``cpu`` (gloo), or ``cuda`` (NCCL, one GPU for each rank).
        limit: seconds within which a process ends a step; then the stacks of its threads are told.
            None: 60, or more on a machine that is slow to start the processes.
        view: a text file for progress, a line for each probe; None: nothing is shown.

    Returns:
        the verdict; its ``findings`` are empty if everything is right.

    Raises:
        TargetError: nothing could be compared: the target cannot be imported, its processes build
            different weights, it returns no tensor, it fails on some ranks, or hangs
            (``HangError``), with whole sequences already.
    """
    _check(ranks, adapter, probes, device, limit)
    begin = time.monotonic()
    text = importable_name(build)
    verdict = Verdict(text, adapter or DEFAULT, ranks)
    try:
        with World(text, adapter, ranks=ranks, device=device, limit=limit) as world:
            evidence = Evidence(world)
            if adapter is None and world.facts["own_shard"]:
                verdict.adapter = "its own shard()"
            verdict.notes = list(filter(None, [evidence.plain.ranks[0].note]))
            for name, result in run_probes(evidence, PROBES if probes is None else probes):
                verdict.probes[name] = result
                if view is not None:
                    print(f"{name}: {result}", file=view, flush=True)
            verdict.findings = evidence.findings
    except Refused as error:  # whole sequences already
        raise TargetError(f"{text}: {error}") from error
    except TargetError as error:
        error.args = (f"{text}: {error}",)
        raise
    verdict.seconds = time.monotonic() - begin
    return verdict


def _check(
    ranks: int, adapter: str | None, probes: Sequence[str] | None, device: str, limit: float | None
) -> None:
    """Raises TargetError for wrong arguments."""
    if INSIDE in os.environ:
        raise TargetError(
            "verify is called while a rank imports its target; call it below "
            'if __name__ == "__main__":'
        )
    if type(ranks) is not int or not 2 <= ranks <= _MOST:
        raise TargetError(f"ranks: got {ranks!r}, expected an integer from 2 to {_MOST}")
    if limit is not None and not 0 < limit < float("inf"):
        raise TargetError(f"limit: got {limit!r}, expected seconds above 0")
    for what, names, choices in (("device", [device], _DEVICES), ("probe", probes or (), PROBES)):
        for name in names:
            if name not in choices:
                raise TargetError(unknown(what, name, choices))
    make_adapter(adapter)  # says what is wrong with it
    if device == "cuda" and (gpus := torch.cuda.device_count()) < ranks:
        raise TargetError(f"device: cuda needs a GPU for each of {ranks} ranks, here are {gpus}")
