"""Probes of what only a training shows: dropout, a stop after which it goes on, and generated
tokens."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from ringray.verification import batches
from ringray.verification.compare import relative
from ringray.verification.observation import COLUMNS
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.world import Refused

_NEW = 4  # tokens that are generated


def dropout(evidence: Evidence) -> None:
    """Compares what dropout modules drop on each pair of ranks: each has rows of its own, and draws
    for itself."""
    try:
        ranks = evidence.world.together(evidence.plain.batch, backward=False, training=True)
    except Refused as error:
        raise Skip(f"with dropout, and another seed on each rank, it raises {error}") from error
    if not any(rank.dropped for rank in ranks):
        raise Skip("the model has no dropout modules")
    for (first, a), (second, b) in combinations(enumerate(ranks), 2):
        for name, mask in a.dropped.items():
            if mask.any() and name in b.dropped and np.array_equal(mask, b.dropped[name]):
                what = f"{name} drops the same elements on ranks {first} and {second}"
                evidence.finding("dropout", "dropout-equal", what, rank=second, layer=name)
                return


def resume(evidence: Evidence) -> None:
    """Trains for two steps, with and without a stop after the first one."""
    case = evidence.plain
    if case.exact.loss is None or not case.exact.gradients:
        raise Skip("the target has no loss to go backward from")
    trained = [case.batch, batches.uneven(evidence.sizes), case.batch]
    exact, *_ = evidence.world.ask("resume", alone=True, batches=trained, exact=True)
    ranks = evidence.world.ask("resume", batches=trained)
    losses = case.combined(ranks)
    allowed = max(case.allowed_loss, case.allowed_gradient)
    for step, (got, again, want) in enumerate(zip(losses[:2], losses[2:], exact, strict=False)):
        for loss, reference, whose in ((got, want, "one process"), (again, got, "the whole run")):
            error = relative(loss, reference)
            if error > allowed:
                what = f"the loss of step {step + 2} is {loss:.6g}, of {whose} {reference:.6g}"
                kind = "step" if whose == "one process" else "resume"
                evidence.finding("resume", kind, what, error=error, allowed=allowed)
                return


def generation(evidence: Evidence) -> None:
    """Checks that each new token has the largest logit that one process computes, which sees all
    tokens before it anew."""
    world, prompt = evidence.world, evidence.plain.batch["input_ids"]
    if not world.facts["generates"]:
        raise Skip("the target has no generate()")
    size = prompt.shape[1]
    for number, tokens in enumerate(world.ask("generate", ids=prompt, new=_NEW)):
        chosen = tokens[:, size:]
        if chosen.max() >= COLUMNS:
            raise Skip("the vocabulary is too large")
        exact = world.alone(batches.batch(tokens), exact=True, backward=False).logits
        if exact is None:
            raise Skip("the target returns no logits")
        rows = exact[:, size - 1 : -1, :COLUMNS]
        # Two tokens may have almost the same logit.
        lead = rows.max(-1) - np.take_along_axis(rows, chosen[..., None], -1)[..., 0]
        wrong = lead > evidence.plain.allowed * abs(rows).max()
        if wrong.any():
            token = size + int(wrong.any(0).argmax())
            what = f"rank {number} generates another token {token} than one process does"
            facts = {"rank": number, "token": token}
            # Contexts grow to lengths that the ranks do not divide.
            evidence.finding("generation", "generation", what, after=("padding",), **facts)
            return
