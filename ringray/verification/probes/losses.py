"""Losses of all ranks against one process."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringray.verification import batches, mistakes
from ringray.verification.compare import Compared
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.verdict import Finding
from ringray.verification.world import Refused

# Kinds of mistakes that are made at the edges of shards.
_IN_SHARDS = "labels-in-shards", "labels-rolled", "labels-ahead"


def router(evidence: Evidence) -> Iterator[Finding]:
    """Compares what a loss has beside cross entropy and does not depend on labels: the loss that
    balances the experts of a router."""
    case = evidence.plain
    _check(case)
    if case.exact.logits is None or not mistakes.beside(case):
        raise Skip("the loss is cross entropy alone")
    if mistakes.labels_matter(case):
        raise Skip("what the loss has beside cross entropy depends on labels")
    if case.losses_differ and case.error <= case.allowed:
        yield from compare(evidence, "router", case)


def loss(evidence: Evidence) -> Iterator[Finding]:
    """Compares losses of whole sequences and of packed documents."""
    yield from compare(evidence, "loss", evidence.plain)
    try:
        case = evidence.packed
    except Refused:  # the probe of documents says so
        return
    yield from compare(evidence, "loss", case, after=("documents",))


def uneven(evidence: Evidence) -> Iterator[Finding]:
    """Compares losses of a batch with many labels on one rank and few on another, and of one all of
    whose labels are on the first rank."""
    _check(evidence.plain)
    yield from compare(evidence, "uneven", evidence.case("uneven", batches.uneven))
    rows = evidence.plain.ranks[0].rows
    case = Compared(evidence.world, batches.labelled(evidence.plain.batch, rows))
    yield from compare(evidence, "uneven", case, after=("uneven",))


def labels(evidence: Evidence) -> Iterator[Finding]:
    """Changes labels at the edges of shards, one at a time: the loss changes as in one process."""
    case = evidence.plain
    _check(case)
    if case.losses_differ:
        raise Skip("the loss differs")
    for token in case.edges[:4]:
        want, got = mistakes.label_changes(case, token)
        assert case.exact.loss is not None
        if abs(got - want) > 4 * case.allowed_loss * abs(case.exact.loss):
            what = f"the label of token {token}, the first of a shard, counts otherwise"
            rank = case.holder(token)
            yield evidence.finding("labels", "labels-in-shards", what, rank=rank, token=token)
            return


def compare(
    evidence: Evidence, probe: str, case: Compared, after: tuple[str, ...] = ()
) -> Iterator[Finding]:
    """Compares the losses of a batch."""
    _check(case)
    if not case.losses_differ:
        return
    assert case.exact.loss is not None
    kind = "loss"
    if case.exact.logits is not None and case.error <= case.allowed:
        kind = mistakes.of_loss(case)
    what = f"the loss is {case.loss:.6g}, of one process {case.exact.loss:.6g}"
    facts: dict[str, int] = {}
    if kind in _IN_SHARDS and case.edges:
        facts = {"rank": case.holder(case.edges[0] - 1), "token": case.edges[0] - 1}
        what += f", first at rank {facts['rank']}, token {facts['token']}"
    elif kind == "not-finite":
        facts = {"rank": next(i for i, x in enumerate(case.ranks) if not np.isfinite(x.loss))}  # type: ignore[arg-type]
        what += f", on rank {facts['rank']}"
    error = abs(case.loss - case.exact.loss) / max(abs(case.exact.loss), 1e-30)
    yield evidence.finding(
        probe, kind, what, after=after, **facts, error=error, allowed=case.allowed_loss
    )


def _check(case: Compared) -> None:
    if case.exact.loss is None or case.ranks[0].loss is None:
        raise Skip("the target returns no loss")
