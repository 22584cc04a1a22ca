"""Tokens that a target generates on ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringray.verification import batches
from ringray.verification.observation import COLUMNS
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.verdict import Finding

_NEW = 4  # tokens that are generated


def generation(evidence: Evidence) -> Iterator[Finding]:
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
            # Contexts grow to lengths that the ranks do not divide.
            yield evidence.finding(
                "generation", "generation", what, after=("padding",), rank=number, token=token
            )
            return
