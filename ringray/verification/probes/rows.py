"""Logits of all ranks against one process, and which token changes which row."""

from __future__ import annotations

import numpy as np

from ringray.verification import batches, mistakes
from ringray.verification.compare import BatchComparison, relative, whole
from ringray.verification.dependence import wrong_dependence
from ringray.verification.probes import losses
from ringray.verification.probes.evidence import Evidence, Skip


def logits(evidence: Evidence) -> None:
    """Compares logits of whole sequences."""
    compare(evidence, "logits", evidence.plain)


def documents(evidence: Evidence) -> None:
    """Compares logits of packed documents."""
    case = evidence.packed
    compare(evidence, "documents", case)
    if case.leaks and not case.apart and case.error <= case.allowed:
        raise Skip("the model takes no boundaries of documents: nothing to compare")


def causality(evidence: Evidence) -> None:
    """Compares dependences in whole sequences, and in packed documents."""
    for case in evidence.cases("causality"):
        if not case.has_logits:
            raise Skip("the target returns no logits")
        if (wrong := wrong_dependence(case)) is not None:
            rank = case.holder(wrong.token)
            verb = "depend" if wrong.depends else "do not depend"
            what = f"the logits of token {wrong.token} on rank {rank} {verb} on {wrong.changed}"
            facts = {"rank": rank, "token": wrong.token}
            evidence.finding("causality", wrong.mistake, what, after=("documents",), **facts)
            return


def positions(evidence: Evidence) -> None:
    """Compares logits at the largest positions that the model has, beyond those of a shard."""
    last = evidence.world.facts["positions"]
    if last is None or last < 2 * evidence.sizes.tokens:
        raise Skip("the model does not say how many positions it has")
    batch = batches.plain(evidence.sizes)
    batch["position_ids"] = batch["position_ids"] + last - evidence.sizes.tokens
    compare(evidence, "positions", BatchComparison(evidence.world, batch, backward=False))


def padding(evidence: Evidence) -> None:
    """Compares logits, the loss and gradients of a length that ranks do not divide, and changes the
    tokens that rows of padding hold."""
    if evidence.world.facts["constants"]["UNIT"] > 1:
        raise Skip("it takes multiples only")
    case = BatchComparison(evidence.world, batches.padded(evidence.sizes))
    seen = any((rank.rows < 0).any() for rank in case.ranks) and _reaches(evidence, case)
    before = len(evidence.findings)
    compare(evidence, "padding", case, "padding-seen" if seen else "")
    for of_loss in (losses.compare, losses.compare_gradients) if case.has_loss else ():
        # The first finding says it all.
        if len(evidence.findings) == before:
            of_loss(evidence, "padding", case)


def _reaches(evidence: Evidence, case: BatchComparison) -> bool:
    """Tells whether logits depend on the tokens of padding."""
    token = evidence.sizes.vocabulary - 1
    ranks = evidence.world.together(case.batch, padding=token)
    change = relative(whole(ranks, [x.logits for x in ranks], len(case.flat)), case.logits)
    return bool(np.isfinite(change) and change > case.allowed)


def compare(evidence: Evidence, probe: str, case: BatchComparison, kind: str = "") -> None:
    """Compares where rows are and what their logits are; ``kind`` of mistake, if known."""
    if not case.has_logits:
        raise Skip("the target returns no logits")
    held = np.concatenate([rank.rows[rank.rows >= 0] for rank in case.ranks])
    counts = np.bincount(held, minlength=len(case.flat))
    if (counts != 1).any():
        token = int((counts != 1).argmax())
        what = f"token {token % case.length} is on {counts[token]} ranks, expected one"
        evidence.finding(probe, "rows-lost", what, token=token % case.length)
    elif case.error > case.allowed:
        what = f"logits differ by {case.error:.1e}, allowed {case.allowed:.1e}"
        facts = {**case.begins._asdict(), "error": case.error, "allowed": case.allowed}
        evidence.finding(probe, kind or mistakes.of_logits(case), what, **facts)
