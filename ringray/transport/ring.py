"""The ring: chunks walk from neighbour to neighbour, one hop ahead of the computation, in the
direction that sends less (Liu et al., Ring Attention, 2023)."""

from __future__ import annotations

from ringray.traffic.routes import around
from ringray.transport.exchange import Exchange, Searched

PARAMETER = None
SEARCHED: Searched = "name"


def exchange(ranks: int, parameter: int | None) -> Exchange:
    """Returns both directions of one ring."""
    return Exchange((around(ranks, +1), around(ranks, -1)))
