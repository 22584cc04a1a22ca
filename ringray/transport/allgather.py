"""All-gather, a few K/V heads at a time: while one group of heads is computed, the next is gathered
from all ranks. Each query meets all its keys in one call, so nothing is merged; the price is memory
for a group's keys of the whole sequence. A rank receives only the rows that it needs. Backward
gathers again and sends each rank's share of dK/dV straight to the owner (Llama 3, 2024, 3.3.2)."""

from __future__ import annotations

from ringray.traffic.routes import straight
from ringray.transport.exchange import Exchange, Searched

PARAMETER = "K/V heads that are gathered at once"
SEARCHED: Searched = "name"


def exchange(ranks: int, parameter: int | None) -> Exchange:
    """Returns one message between any two ranks per group of heads; by default one head."""
    return Exchange((straight(ranks),), heads_at_once=parameter or 1)
