"""All-gather, a few K/V heads at a time: while one group of heads is computed, the next is gathered
from all ranks. Each query meets all its keys in one call, so nothing is merged; the price is memory
for a group's keys of the whole sequence. Only rows that a rank needs are sent to it. Backward
gathers again and sends each rank's share of dK/dV straight to the owner (Llama 3, 2024, 3.3.2)."""

from __future__ import annotations

from ringray.traffic.routes import straight
from ringray.transport.exchange import Exchange

PARAMETER = "K/V heads that are gathered at once"


def exchange(ranks: int, parameter: int | None) -> Exchange:
    """One message between any two ranks and group of heads; by default one head at a time."""
    return Exchange((straight(ranks),), heads_at_once=parameter or 1)
