"""``verify``: does a model that is split over ranks compute what one process computes?

The target runs on small batches in one process, in fp64 and in its own dtype, and on several ranks;
logits, losses and every gradient are compared by the error budget of the ring, and probes change
single tokens, labels and documents. In reading order:

target    what is verified: a file, or module:function, above an adapter
defaults  what a target does unless it says otherwise
adapters  ways to run a plain model on ranks, one file each
double    fp64 in place of fp32
process   one process: it builds the model and runs batches
world     the processes of a target, their answers, errors and hangs
batches   what they run
compare   one batch computed by one process and by all ranks, and where the results part
probes    what is tried
mistakes  which kind of mistake gives such numbers
verdict   what it came to
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ringray.base.errors import unknown
from ringray.verification.probes import PROBES, Evidence, Skip
from ringray.verification.target import DEFAULT, TargetError, spelled
from ringray.verification.verdict import Finding, Verdict
from ringray.verification.world import HangError, Refused, World

__all__ = ["Finding", "HangError", "TargetError", "Verdict", "verify"]


def verify(
    build: str | Callable[..., Any],
    *,
    ranks: int = 2,
    adapter: str | None = None,
    probes: Sequence[str] | None = None,
    device: str = "cpu",
    limit: float = 60.0,
) -> Verdict:
    """Compares a model that is split over ranks with the same model in one process.

    Each rank is a new process, which imports the target by its name.

    Args:
        build: a function that returns the model, or (model, shard); or a Python file or
            ``module:function``. The target's other functions: ``ringray.verification.target``.
        ranks: processes of the ring, at least 2.
        adapter: how a plain model runs on them, a name of ``ringray.verification.target.ADAPTERS``;
            None: our ring.
        probes: names of ``ringray.verification.probes.PROBES``; None: all.
        device: ``cpu`` (gloo), or ``cuda`` (NCCL, one GPU for each rank).
        limit: seconds within which a process answers a request; then the stacks of its threads are
            told.

    Returns:
        the verdict; its ``findings`` are empty if everything is right.

    Raises:
        TargetError: nothing could be compared: the target cannot be imported, its processes build
            different weights, it returns no tensor, it fails on some ranks, or hangs
            (``HangError``).
    """
    if type(ranks) is not int or ranks < 2:
        raise TargetError(f"ranks: got {ranks!r}, expected an integer of at least 2")
    chosen = list(PROBES) if probes is None else list(probes)
    for name in chosen:
        if name not in PROBES:
            raise TargetError(unknown("probe", name, PROBES))
    begin = time.monotonic()
    text = spelled(build)
    verdict = Verdict(text, adapter or DEFAULT, ranks)
    with World(text, adapter, ranks=ranks, device=device, limit=limit) as world:
        evidence = Evidence(world)
        try:
            _ = evidence.plain
        except Refused as error:
            raise TargetError(f"{text}: fails on every rank: {error}") from error
        for name in chosen:
            try:
                findings = list(PROBES[name](evidence))
            except (Skip, Refused) as error:
                verdict.probes[name] = f"skipped: {str(error).splitlines()[0]}"
                continue
            verdict.findings += findings
            verdict.probes[name] = "wrong" if findings else "right"
    verdict.seconds = time.monotonic() - begin
    return verdict
