"""Both neighbours at once: a chunk walks half of the ring in each direction, so that links which
carry both directions at full speed need half as many steps."""

from __future__ import annotations

from ringray.traffic.routes import both_ways
from ringray.transport.exchange import Exchange, Searched

PARAMETER = None
SEARCHED: Searched = "name"


def exchange(ranks: int, parameter: int | None) -> Exchange:
    """Returns two lanes per chunk; for an even number of ranks the longer may go either way."""
    others = ranks - 1
    return Exchange(
        tuple(both_ways(ranks, up) for up in sorted({others - others // 2, others // 2}))
    )
