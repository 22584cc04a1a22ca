"""Double ring: a ring within each node, and one across nodes whose transfers have the time of a
whole inner ring, so that a slow network carries 1/node-size of the hops (Gu et al., LoongTrain,
2024; Sun et al., BurstAttention, 2024)."""

from __future__ import annotations

from ringray.traffic.routes import ring_of_rings
from ringray.transport.exchange import Exchange

PARAMETER = "ranks per node"


def exchange(ranks: int, parameter: int | None) -> Exchange:
    """Nodes of ``parameter`` consecutive ranks; by default two nodes, or one if that is odd."""
    node = parameter or (ranks // 2 if ranks % 2 == 0 else ranks)
    if ranks % node:
        raise ValueError(
            f"transport 'double-ring:{node}': {ranks / node:.4g} (nodes) x {node} (ranks per node) "
            f"= {ranks} ranks does not multiply out; take a divisor of {ranks}"
        )
    return Exchange(
        tuple(ring_of_rings(ranks, node, outer, inner) for outer in (1, -1) for inner in (1, -1))
    )
