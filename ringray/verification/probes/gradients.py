"""Gradients of all ranks, after their reduction, against one process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringray.verification import mistakes
from ringray.verification.compare import Compared
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.verdict import Finding


def gradients(evidence: Evidence) -> Iterator[Finding]:
    """Compares every gradient on every rank."""
    if not evidence.plain.exact.gradients:
        raise Skip("the target has no loss to go backward from")
    yield from compare(evidence, "gradients", evidence.plain)


def compare(evidence: Evidence, probe: str, case: Compared) -> Iterator[Finding]:
    """Compares the gradients of a batch."""
    allowed = case.allowed_gradient
    worst = [max(case.gradient_errors(rank).values(), default=0.0) for rank in case.ranks]
    if max(worst) <= allowed:
        return
    rank, wrong = int(np.argmax(worst)), [i for i, x in enumerate(worst) if not x <= allowed]
    kind, name = mistakes.of_gradients(case, rank)
    what = (
        f"gradients on rank {', '.join(map(str, wrong))} differ by up to {max(worst):.1e}, "
        f"allowed {allowed:.1e}; backward, {name} is the first of them"
    )
    yield evidence.finding(
        probe, kind, what, rank=rank, layer=name, error=max(worst), allowed=allowed
    )


def norm(evidence: Evidence) -> Iterator[Finding]:
    """Compares the norm by which gradients are clipped, on every rank."""
    case = evidence.plain
    if case.own.norm is None:
        raise Skip("the target has no gradients")
    # The reference's own: that of all its gradients, whatever the target's function computes.
    squares = sum(float(np.square(x).sum()) for x in case.exact.gradients.values())
    want = float(np.sqrt(squares))
    for number, rank in enumerate(case.ranks):
        assert rank.norm is not None
        error = abs(rank.norm - want) / max(want, 1e-30)
        allowed = max(case.allowed_gradient, 2 * abs(case.own.norm - want) / max(want, 1e-30), 1e-5)
        if not error <= allowed:
            what = (
                f"the norm of the gradients is {rank.norm:.6g} on rank {number}, of one process "
                f"{want:.6g}"
            )
            yield evidence.finding("norm", "norm", what, rank=number, error=error, allowed=allowed)
            return
