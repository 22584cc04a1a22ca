"""Straight from the owner: a rank sends rows of its chunk to both neighbours, then to the ranks
after these, and so on, and each of them sends the gradients straight back. No rank hands rows on,
so each receives only the rows that it computes with. Links that carry both directions at full speed
are busy in both, as with ``bidirectional``."""

from __future__ import annotations

from ringray.traffic.routes import rotations
from ringray.transport.exchange import Exchange, Searched

PARAMETER = None
SEARCHED: Searched = "name"


def exchange(ranks: int, parameter: int | None) -> Exchange:
    """Returns one message to each rank that needs rows, one rank further up and down at
    each step."""
    return Exchange((rotations(ranks),))
