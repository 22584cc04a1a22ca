"""Ulysses x ring in two dimensions: neighbouring ranks (such as one node) exchange heads for rows,
and chunks of their joined rows walk the ring of these groups (Fang and Zhao, USP, 2024)."""

from __future__ import annotations

from ringray.traffic.routes import around
from ringray.transport.exchange import Exchange, Searched

PARAMETER = "Ulysses degree: neighbouring ranks that exchange heads"
SEARCHED: Searched = "divisors"


def exchange(ranks: int, parameter: int | None) -> Exchange:
    """Returns a ring of groups of ``parameter`` ranks; the default is the largest divisor up to the
    square root."""
    fold = parameter or max(d for d in range(1, ranks + 1) if ranks % d == 0 and d * d <= ranks)
    if ranks % fold:
        raise ValueError(
            f"transport 'hybrid:{fold}': {fold} (Ulysses) x {ranks / fold:.4g} (ring) = {ranks} "
            f"ranks does not multiply out; take a divisor of {ranks}"
        )
    around_ring = ranks // fold
    return Exchange((around(around_ring, +1), around(around_ring, -1)), fold=fold, inner=fold)
