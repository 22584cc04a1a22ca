"""Straight from the owner: a rank sends rows of its chunk to the next rank, then to the one after
it, and so on, and each of them sends the gradients straight back. No rank hands rows on, so each
receives only the rows that it computes with."""

from __future__ import annotations

from ringray.traffic.routes import rotations
from ringray.transport.exchange import Exchange, Searched

PARAMETER = None
SEARCHED: Searched = "name"


def exchange(ranks: int, parameter: int | None) -> Exchange:
    """Returns one message to each rank that needs rows, one rank further at each step."""
    return Exchange((rotations(ranks),))
