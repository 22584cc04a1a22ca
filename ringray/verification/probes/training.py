"""What only a training shows: dropout, and a stop after which it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from ringray.verification import batches
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.verdict import Finding


def dropout(evidence: Evidence) -> Iterator[Finding]:
    """Compares what dropout modules drop on each pair of ranks: each has rows of its own, and draws
    for itself."""
    ranks = evidence.world.together(evidence.plain.batch, backward=False, training=True)
    if not any(rank.dropped for rank in ranks):
        raise Skip("the model has no dropout modules")
    for (first, a), (second, b) in combinations(enumerate(ranks), 2):
        for name, mask in a.dropped.items():
            if mask.any() and name in b.dropped and np.array_equal(mask, b.dropped[name]):
                what = f"{name} drops the same elements on ranks {first} and {second}"
                facts = {"rank": second, "layer": name}
                yield evidence.finding("dropout", "dropout-equal", what, after=None, **facts)
                return


def resume(evidence: Evidence) -> Iterator[Finding]:
    """Trains for two steps, with and without a stop after the first one."""
    case = evidence.plain
    if case.exact.loss is None or not case.exact.gradients:
        raise Skip("the target has no loss to go backward from")
    trained = [case.batch, batches.uneven(evidence.sizes), case.batch]
    exact, *_ = evidence.world.ask("resume", alone=True, batches=trained, exact=True)
    ranks = evidence.world.ask("resume", batches=trained)
    mean = evidence.constants["LOSS"] == "mean"
    losses = np.mean(ranks, 0) if mean else np.sum(ranks, 0)
    allowed = max(case.allowed_loss, case.allowed_gradient)
    for step, (got, again, want) in enumerate(zip(losses[:2], losses[2:], exact, strict=False)):
        for loss, reference, whose in ((got, want, "one process"), (again, got, "the whole run")):
            error = abs(loss - reference) / max(abs(reference), 1e-30)
            if not error <= allowed:
                what = f"the loss of step {step + 2} is {loss:.6g}, of {whose} {reference:.6g}"
                kind = "step" if whose == "one process" else "resume"
                yield evidence.finding("resume", kind, what, error=error, allowed=allowed)
                return
