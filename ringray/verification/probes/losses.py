"""Losses of all ranks against one process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringray.verification import batches, mistakes
from ringray.verification.compare import Comparison
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.verdict import Finding


def loss(evidence: Evidence) -> Iterator[Finding]:
    """Compares losses of whole sequences and of packed documents."""
    yield from _compare(evidence, "loss", evidence.plain)


def uneven(evidence: Evidence) -> Iterator[Finding]:
    """Compares losses of a batch with many labels on one rank and few on another."""
    yield from _compare(evidence, "uneven", evidence.case("uneven", batches.uneven))


def labels(evidence: Evidence) -> Iterator[Finding]:
    """Changes labels at the edges of shards, one at a time: the loss changes as in one process."""
    case = evidence.plain
    before = _losses(evidence, case)
    if abs(before[1] - before[0]) > _allowed(case):
        raise Skip("the loss differs")
    edges = set()
    for rank in case.ranks:
        columns = np.sort(rank.rows[0][rank.rows[0] >= 0] % case.length)
        edges |= {int(x) for x in columns if x and x - 1 not in columns}
    for token in sorted(edges)[:4]:
        tokens = case.batch["labels"].copy()
        tokens[:, token] = (tokens[:, token] + 1) % evidence.sizes.vocabulary
        batch = batches.batch(case.batch["input_ids"], labels=tokens)
        want, got = _losses(evidence, Comparison(evidence.world, batch, backward=False))
        gap = abs((got - before[1]) - (want - before[0]))
        if gap > 4 * _allowed(case):
            what = f"the label of token {token}, the first of a shard, counts otherwise"
            yield evidence.finding("labels", "labels-in-shards", what, token=token, error=gap)
            return


def _compare(evidence: Evidence, probe: str, case: Comparison) -> Iterator[Finding]:
    want, got = _losses(evidence, case)
    if not abs(got - want) <= _allowed(case):
        kind = "loss"
        if case.exact.logits is not None and case.error <= case.allowed:
            kind = mistakes.of_loss(case, got)
        what = f"the loss is {got:.6g}, of one process {want:.6g}"
        error, allowed = abs(got - want) / max(abs(want), 1e-30), case.allowed_loss
        yield evidence.finding(probe, kind, what, error=error, allowed=allowed)


def _losses(evidence: Evidence, case: Comparison) -> tuple[float, float]:
    if case.exact.loss is None or case.ranks[0].loss is None:
        raise Skip("the target returns no loss")
    return case.exact.loss, case.loss(evidence.constants["LOSS"])


def _allowed(case: Comparison) -> float:
    assert case.exact.loss is not None
    return case.allowed_loss * max(abs(case.exact.loss), 1e-30)
