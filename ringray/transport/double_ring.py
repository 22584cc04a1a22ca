"""Double ring: a ring within each node, and one across nodes whose transfers may take as long as a
whole inner ring, so that a slow network carries 1/node-size of the hops (Gu et al., LoongTrain,
2024; Sun et al., BurstAttention, 2024)."""

from __future__ import annotations

from ringray.traffic.routes import ring_of_rings
from ringray.transport.exchange import Exchange, Searched

PARAMETER = "ranks per node"
SEARCHED: Searched = "divisors"


def exchange(ranks: int, parameter: int | None) -> Exchange:
    """Returns a ring of nodes of ``parameter`` consecutive ranks; by default two nodes, or one if
    the number of ranks is odd."""
    node = parameter or (ranks // 2 if ranks % 2 == 0 else ranks)
    if ranks % node:
        raise ValueError(
            f"transport 'double-ring:{node}': {ranks / node:.4g} (nodes) x {node} (ranks per node) "
            f"= {ranks} ranks does not multiply out; take a divisor of {ranks}"
        )
    routes = (ring_of_rings(ranks, node, outer, inner) for outer in (1, -1) for inner in (1, -1))
    return Exchange(tuple(routes), inner=node)
