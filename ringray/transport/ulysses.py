"""Ulysses: all ranks exchange heads for rows, so that each computes the whole sequence for its
share of the heads (Jacobs et al., DeepSpeed Ulysses, 2023). Heads and K/V heads must be multiples
of the ring size; its balance does not depend on masks and partitions."""

from __future__ import annotations

from ringray.traffic.routes import around
from ringray.transport.exchange import Exchange, Searched

PARAMETER = None
SEARCHED: Searched = "name"


def exchange(ranks: int, parameter: int | None) -> Exchange:
    """Returns one exchange between all ranks; nothing walks."""
    return Exchange((around(1, +1),), fold=ranks)
