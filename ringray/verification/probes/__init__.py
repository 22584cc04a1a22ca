"""Probes: what is tried of a target, in the order of this list, one function each.

A probe is a function ``(evidence) -> iterator of findings``. It raises ``Skip`` with a reason where
a target has nothing to try, and lets ``Refused`` pass where a target refuses a batch itself. To add
one, write the function and name it in ``PROBES``; every target of the contract suite then runs it.

forward    logits of whole sequences, packed documents and odd lengths
causality  which token changes which row
losses     losses, uneven labels, labels at the edges of shards
gradients  every gradient, and their norm
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ringray.verification.probes import causality, forward, gradients, losses
from ringray.verification.probes.evidence import Evidence, Skip
from ringray.verification.verdict import Finding

__all__ = ["PROBES", "Evidence", "Skip"]

Probe = Callable[[Evidence], Iterator[Finding]]

PROBES: dict[str, Probe] = {
    "logits": forward.logits,
    "documents": forward.documents,
    "padding": forward.padding,
    "causality": causality.causality,
    "loss": losses.loss,
    "labels": losses.labels,
    "uneven": losses.uneven,
    "gradients": gradients.gradients,
    "norm": gradients.norm,
}
