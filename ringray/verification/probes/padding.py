"""Sequences whose length the ranks do not divide, and what the rows hold that fill them up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringray.verification import batches
from ringray.verification.compare import Compared, relative, whole
from ringray.verification.probes import forward, gradients, losses
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.verdict import Finding


def padding(evidence: Evidence) -> Iterator[Finding]:
    """Compares logits, the loss and gradients, and changes the tokens that rows of padding hold."""
    if evidence.constants["UNIT"] > 1:
        raise Skip("it takes multiples only")
    case = evidence.case("padded", batches.padded)
    seen = any((rank.rows < 0).any() for rank in case.ranks) and _reaches(evidence, case)
    before = len(evidence.findings)
    yield from forward.compare(evidence, "padding", case, "padding-seen" if seen else "")
    if case.exact.loss is None:
        return
    for compare in (losses.compare, gradients.compare):
        # The first finding says it all.
        if len(evidence.findings) == before:
            yield from compare(evidence, "padding", case)


def _reaches(evidence: Evidence, case: Compared) -> bool:
    """Tells whether logits depend on the tokens of padding."""
    token = evidence.sizes.vocabulary - 1
    ranks = evidence.world.together(case.batch, padding=token)
    logits = whole(ranks, [x.logits for x in ranks if x.logits is not None], len(case.flat))
    change = relative(logits, case.logits)
    return bool(np.isfinite(change) and change > case.allowed)
