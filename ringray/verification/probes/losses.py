"""Losses of all ranks against one process, and gradients after their reduction."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringray.verification import batches, mistakes
from ringray.verification.compare import BatchComparison, relative
from ringray.verification.probes.evidence import Evidence, Skip

# Kinds of mistakes that are made at the edges of shards.
_IN_SHARDS = "labels-in-shards", "labels-rolled", "labels-ahead"


def router(evidence: Evidence) -> None:
    """Compares what a loss has beside cross entropy and does not depend on labels: the loss that
    balances the experts of a router."""
    case = evidence.plain
    _check(case)
    if case.exact.logits is None or not mistakes.rest_of_loss(case):
        raise Skip("no router's loss: the loss is cross entropy of the next token alone")
    if mistakes.labels_matter(case):
        raise Skip("what the loss has beside cross entropy depends on labels: no router's loss")
    if case.has_logits and case.error <= case.allowed:
        compare(evidence, "router", case)


def loss(evidence: Evidence) -> None:
    """Compares losses of whole sequences and of packed documents."""
    _check(evidence.plain)
    for case in evidence.cases("loss"):
        # Of documents that run by themselves, only the cross entropy is known.
        if not case.apart or not mistakes.rest_of_loss(evidence.plain):
            if case is evidence.plain:
                compare(evidence, "loss", case, "of whole sequences ")
            else:
                compare(evidence, "loss", case, "of packed documents ", after=("documents",))


def uneven(evidence: Evidence) -> None:
    """Compares losses of a batch with many labels on one rank and few on another, and of one all of
    whose labels are on the first rank."""
    _check(evidence.plain)
    rows = evidence.plain.ranks[0].rows
    for what, batch in (
        ("with few labels in the first shards ", batches.uneven(evidence.sizes)),
        ("with all labels on rank 0 ", batches.labelled(evidence.plain.batch, rows)),
    ):
        case = BatchComparison(evidence.world, batch)
        compare(evidence, "uneven", case, what, after=("uneven",))


def labels(evidence: Evidence) -> None:
    """Changes labels at the edges of shards, one at a time: the loss changes as in one process."""
    case = evidence.plain
    _check(case)
    if case.loss_error > case.allowed_loss:
        raise Skip("the loss differs")
    for token in case.edges[:4]:
        want, got = mistakes.label_changes(case, token)
        if abs(got - want) > 4 * case.allowed_loss * abs(case.exact.loss):
            what = f"the label of token {token}, the first of a shard, counts otherwise"
            rank = case.holder(token)
            evidence.finding("labels", "labels-in-shards", what, rank=rank, token=token)
            return


def compare(
    evidence: Evidence,
    probe: str,
    case: BatchComparison,
    batch: str = "",
    after: tuple[str, ...] = (),
) -> None:
    """Compares the losses of a batch; ``batch``: which one, in words."""
    _check(case)
    if case.loss_error <= case.allowed_loss:
        return
    right = case.has_logits and case.error <= case.allowed
    kind = mistakes.of_loss(case) if right else "loss"
    facts: dict[str, Any] = {"error": case.loss_error, "allowed": case.allowed_loss}
    if kind in _IN_SHARDS and case.edges:
        token = case.edges[0] - 1
        facts |= {"rank": case.holder(token), "token": token}
    elif not np.isfinite(case.loss):
        facts |= {"rank": next(i for i, x in enumerate(case.ranks) if not np.isfinite(x.loss))}
    what = f"the loss {batch}is {case.loss:.6g}, of one process {case.exact.loss:.6g}"
    evidence.finding(probe, kind, what, after=after, **facts)


def gradients(evidence: Evidence) -> None:
    """Compares every gradient on every rank."""
    if not evidence.plain.exact.gradients:
        raise Skip("the target has no loss to go backward from")
    compare_gradients(evidence, "gradients", evidence.plain)


def compare_gradients(evidence: Evidence, probe: str, case: BatchComparison) -> None:
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
    facts: dict[str, Any] = {"rank": rank, "layer": name, "error": max(worst)}
    evidence.finding(probe, kind, what, allowed=allowed, **facts)


def norm(evidence: Evidence) -> None:
    """Compares the norm by which gradients are clipped, on every rank."""
    case = evidence.plain
    if case.own.norm is None:
        raise Skip("the target has no gradients")
    # The norms of all gradients of one process, whatever the target's function computes.
    want, own = (
        float(np.sqrt(sum(float(np.square(x).sum()) for x in run.gradients.values())))
        for run in (case.exact, case.own)
    )
    allowed = max(case.allowed_gradient, 2 * relative(own, want), 1e-5)
    for number, rank in enumerate(case.ranks):
        error = relative(rank.norm, want)
        if error > allowed:
            what = (
                f"the norm of the gradients is {rank.norm:.6g} on rank {number}, of one process "
                f"{want:.6g}"
            )
            evidence.finding("norm", "norm", what, rank=number, error=error, allowed=allowed)
            return


def _check(case: BatchComparison) -> None:
    if not case.has_loss:
        raise Skip("the target returns no loss")
