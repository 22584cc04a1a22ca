"""The ring: chunks walk from neighbour to neighbour, one hop ahead of what is computed, in the
direction that sends less (Liu et al., Ring Attention, 2023)."""

from __future__ import annotations

from ringray.traffic.routes import around
from ringray.transport.exchange import Exchange

PARAMETER = None


def exchange(ranks: int, parameter: int | None) -> Exchange:
    """Both directions of one ring."""
    return Exchange((around(ranks, +1), around(ranks, -1)))
