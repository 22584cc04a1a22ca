"""Probes: what is tried of a target, in the order of this list, one function each.

A probe is a function of the evidence, to which it adds findings. It raises ``Skip`` with a reason
where a target has nothing to try, and lets ``Refused`` pass where a target refuses a batch itself.
To add one, write the function and name it in ``PROBES``; every target of the contract suite then
runs it.

evidence  what the probes of one verification share
rows      logits of whole sequences and packed documents, what they depend on, large positions,
          lengths that the ranks do not divide
losses    losses, labels, a router's loss, every gradient and their norm
training  dropout, a training that stops and goes on, tokens that are generated
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ringray.verification.probes import losses, rows, training
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.world import FailedRank, Refused

__all__ = ["PROBES", "Evidence", "Skip", "run_probes"]

# In an order in which causes come before what follows from them.
PROBES: dict[str, Callable[[Evidence], None]] = {
    "logits": rows.logits,
    "documents": rows.documents,
    "causality": rows.causality,
    "positions": rows.positions,
    "router": losses.router,
    "loss": losses.loss,
    "labels": losses.labels,
    "uneven": losses.uneven,
    "gradients": losses.gradients,
    "norm": losses.norm,
    "padding": rows.padding,
    "dropout": training.dropout,
    "resume": training.resume,
    "generation": training.generation,
}


def run_probes(evidence: Evidence, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Runs probes, and generates the name of each and what it comes to; findings are added to those
    of the evidence."""
    for name in names:
        before, skipped = len(evidence.findings), ""
        try:
            PROBES[name](evidence)
        except Refused as error:
            skipped = f"skipped: {str(error).splitlines()[0]}"
        except FailedRank as error:
            evidence.failed(name, error)
            skipped = "skipped: its batch fails on some ranks only"
        yield name, "wrong" if len(evidence.findings) > before else skipped or "right"
