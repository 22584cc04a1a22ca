"""Logits of all ranks against one process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringray.verification import batches, mistakes
from ringray.verification.compare import Compared
from ringray.verification.probes.causality import wrong_dependence
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.verdict import Finding


def logits(evidence: Evidence) -> Iterator[Finding]:
    """Compares logits of whole sequences."""
    yield from compare(evidence, "logits", evidence.plain)


def documents(evidence: Evidence) -> Iterator[Finding]:
    """Compares logits of packed documents."""
    yield from compare(evidence, "documents", evidence.packed)


def positions(evidence: Evidence) -> Iterator[Finding]:
    """Compares logits at the largest positions that the model has, beyond those of a shard."""
    last = evidence.world.facts["positions"]
    if last is None or last < 2 * evidence.sizes.tokens:
        raise Skip("the model does not say how many positions it has")
    batch = batches.plain(evidence.sizes)
    batch["position_ids"] = batch["position_ids"] + last - evidence.sizes.tokens
    case = Compared(evidence.world, batch, backward=False)
    yield from compare(evidence, "positions", case)


def compare(evidence: Evidence, probe: str, case: Compared, kind: str = "") -> Iterator[Finding]:
    """Compares where rows are and what their logits are; ``kind`` of mistake, if known."""
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
    kind = kind or mistakes.of_logits(case)
    if not kind:
        wrong = wrong_dependence(evidence, case)
        # The second token is the first one that two keys of one rank can get wrong.
        late = place.token is not None and place.token > 1
        kind = wrong[0][0] if wrong else "keys-twice" if late else "attention"
    what = f"logits differ by {case.error:.1e}, allowed {case.allowed:.1e}, first at {place}"
    yield evidence.finding(
        probe, kind, what, **place._asdict(), error=case.error, allowed=case.allowed
    )
