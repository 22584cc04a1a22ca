"""Probes: what is tried of a target, in the order of this list, one function each.

A probe is a function ``(evidence) -> iterator of findings``. It raises ``Skip`` with a reason where
a target has nothing to try, and lets ``Refused`` pass where a target refuses a batch itself. To add
one, write the function and name it in ``PROBES``; every target of the contract suite then runs it.

forward    logits of whole sequences, packed documents, and at large positions
causality  which token changes which row
losses     losses, uneven labels, labels at the edges of shards, a router's loss
gradients  every gradient, and their norm
padding    lengths that the ranks do not divide, and what fills them up
training   dropout, and a training that stops and goes on
generation tokens that are generated
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ringray.verification.probes import (
    causality,
    forward,
    generation,
    gradients,
    losses,
    padding,
    training,
)  # fmt: skip
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.verdict import Finding
from ringray.verification.world import FailedRank, Refused

__all__ = ["PROBES", "Evidence", "Skip", "tried"]

Probe = Callable[[Evidence], Iterator[Finding]]

# In an order in which causes come before what follows from them.
PROBES: dict[str, Probe] = {
    "logits": forward.logits,
    "documents": forward.documents,
    "causality": causality.causality,
    "positions": forward.positions,
    "router": losses.router,
    "loss": losses.loss,
    "labels": losses.labels,
    "uneven": losses.uneven,
    "gradients": gradients.gradients,
    "norm": gradients.norm,
    "padding": padding.padding,
    "dropout": training.dropout,
    "resume": training.resume,
    "generation": generation.generation,
}


def tried(evidence: Evidence, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Runs probes, and generates the name of each and what it comes to; findings are added to those
    of the evidence."""
    for name in names:
        before, skipped = len(evidence.findings), ""
        try:
            for _ in PROBES[name](evidence):
                pass
        except (Skip, Refused) as error:
            skipped = f"skipped: {str(error).splitlines()[0]}"
        except FailedRank as error:
            evidence.failed(name, error)
            skipped = "skipped: its batch fails on some ranks only"
        yield name, "wrong" if len(evidence.findings) > before else skipped or "right"
