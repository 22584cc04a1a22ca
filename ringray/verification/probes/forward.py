"""Logits of all ranks against one process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringray.verification import batches, mistakes
from ringray.verification.compare import Comparison
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.verdict import Finding


def logits(evidence: Evidence) -> Iterator[Finding]:
    """Compares logits of whole sequences."""
    yield from _compare(evidence, "logits", evidence.plain)


def documents(evidence: Evidence) -> Iterator[Finding]:
    """Compares logits of packed documents."""
    yield from _compare(evidence, "documents", evidence.packed)


def padding(evidence: Evidence) -> Iterator[Finding]:
    """Compares logits of sequences whose length the ranks do not divide."""
    if evidence.constants["UNIT"] > 1:
        raise Skip("it takes multiples only")
    yield from _compare(evidence, "padding", evidence.case("padded", batches.padded))


def _compare(evidence: Evidence, probe: str, case: Comparison) -> Iterator[Finding]:
    if case.exact.logits is None or case.ranks[0].logits is None:
        raise Skip("the target returns no logits")
    held = np.concatenate([rank.rows[rank.rows >= 0] for rank in case.ranks])
    counts = np.bincount(held, minlength=len(case.flat))
    if (counts != 1).any():
        token = int((counts != 1).argmax())
        what = f"token {token % case.length} is on {counts[token]} ranks, expected one"
        yield evidence.finding(probe, "rows-lost", what, token=token % case.length)
        return
    if case.error <= case.allowed:
        return
    place = case.begins()
    kind = mistakes.of_logits(case) or _by_dependence(evidence, case)
    what = f"logits differ by {case.error:.1e}, allowed {case.allowed:.1e}, first at {place}"
    yield evidence.finding(
        probe, kind, what, **place._asdict(), error=case.error, allowed=case.allowed
    )


def _by_dependence(evidence: Evidence, case: Comparison) -> str:
    """Returns the kind of mistake that shows in which token changes which row."""
    from ringray.verification.probes.causality import wrong_dependence

    for kind, _, _ in wrong_dependence(evidence, case):
        return kind
    return "attention"
