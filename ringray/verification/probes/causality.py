"""Which token changes which row: one token becomes another one, and the rows that change are those
that depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from ringray.verification import batches
from ringray.verification.compare import Compared, whole
from ringray.verification.observation import Array, Observation
from ringray.verification.probes.evidence import Evidence
from ringray.verification.verdict import Finding
from ringray.verification.world import Refused

# Shares of the largest change of a row: above one a row depends on a token, below the other it
# does not.
_DEPENDS, _DOES_NOT = 1e-3, 1e-6

Dependence = tuple[str, int, int]  # kind of mistake, the token that was changed, the wrong row


def causality(evidence: Evidence) -> Iterator[Finding]:
    """Compares dependences in whole sequences, and in packed documents."""
    cases = [evidence.plain]
    with suppress(Refused):  # the probe of documents says so
        cases.append(evidence.packed)
    for case in cases:
        for kind, token, row in wrong_dependence(evidence, case):
            rank = case.holder(row)
            verb = "does not depend" if kind == "lost-keys" else "depends"
            what = f"the logits of token {row} on rank {rank} {verb} on token {token}"
            yield evidence.finding(
                "causality", kind, what, after=("documents",), rank=rank, token=row
            )
            return


def wrong_dependence(evidence: Evidence, case: Compared) -> list[Dependence]:
    """Returns dependences of rows on tokens that one process has not, and then those that only it
    has: a wrong mask makes both."""
    return sorted(_dependences(evidence, case), key=lambda x: x[0] == "lost-keys")


def _dependences(evidence: Evidence, case: Compared) -> Iterator[Dependence]:
    documents = batches.document_of(case.batch)
    for token in _tokens(case):
        batch = batches.changed(case.batch, token, evidence.sizes.vocabulary)
        after = evidence.world.alone(batch, exact=True, backward=False)
        want = _change(case, case.flat, [after])
        got = _change(case, case.logits, evidence.world.together(batch, backward=False))
        for row in np.flatnonzero((got > _DEPENDS) & (want < _DOES_NOT)):
            kind = "documents" if documents[row] != documents[token] else "future"
            yield kind, token, int(row)
        for row in np.flatnonzero((want > _DEPENDS) & (got < _DOES_NOT)):
            yield "lost-keys", token, int(row)


def _change(case: Compared, before: Array, after: list[Observation]) -> Array:
    """Returns the largest change of each position's logits (S,), as a share of the largest."""
    logits = whole(after, [x.logits for x in after if x.logits is not None], len(case.flat))
    gaps = np.abs(logits - before).max(-1).reshape(-1, case.length).max(0)
    return gaps / max(float(gaps.max()), 1e-30)


def _tokens(case: Compared) -> list[int]:
    """Returns tokens to change: the first and the last of each rank's runs of positions, and those
    beside the boundaries of documents."""
    # Striped ranks have as many runs as rows; two of each are enough.
    begins = case.edges[: 2 * len(case.ranks)]
    edges = {0, case.length - 2, *begins, *(x - 1 for x in begins)}
    ends = case.batch.get("cu_seqlens", np.zeros(0, dtype=np.int64))[1:-1]
    edges |= {int(x) for x in ends} | {int(x) - 1 for x in ends}
    return sorted(edges)
