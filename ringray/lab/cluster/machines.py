"""The machines that the rings of one run hold, so that measurements do not disturb each other.

Rings side by side share no machine, but for GPU rings that each lie within it: they share neither
devices nor its network. Ray's nodes with one address are one machine.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringray.lab.cluster.capacity import Capacity, NodeGroup, Placement, from_nodes

Nodes = Callable[[], Sequence[Mapping[str, Any]]]  # as ray.nodes()


class Machines:
    """``nodes``: returns the present ones. ``shared``: rings of GPUs may share the network of a
    machine, because the user asks for it; ``grows``: there can be more nodes. Holders are the pools
    of rings."""

    def __init__(self, nodes: Nodes, *, shared: bool = False, grows: bool = False) -> None:
        self._nodes, self._shared, self.grows = nodes, shared, grows
        self._held: dict[Hashable, tuple[Counter[str], bool]] = {}  # ranks by node; within one
        self._lock = threading.Lock()

    def placement(self, wanted: Placement, size: int, avoid: Collection[str] = ()) -> Placement:
        """Returns the placement of a ring of ``size``: on one node, if GPUs of one can hold it that
        is not to ``avoid``."""
        if wanted.device != "cuda" or wanted.strategy != "PACK":
            return wanted
        present = from_nodes(node for node in self._alive() if node["NodeID"] not in avoid)
        within = present.ranks(dict(wanted.bundle), "STRICT_PACK") >= size
        return replace(wanted, strategy="STRICT_PACK") if within else wanted

    def fits(
        self,
        placement: Placement,
        size: int,
        avoid: Collection[str] = (),
        but: Collection[Hashable] = (),
    ) -> bool:
        """Tells whether a ring has a place now, without the nodes to ``avoid``; the holders ``but``
        are about to give theirs back."""
        held = {holder: ring for holder, ring in dict(self._held).items() if holder not in but}
        closed = {*avoid, *self._shut(placement, held)}
        taken = sum((ranks for ranks, _ in held.values()), Counter[str]())
        free = [
            _group(node, placement, taken[node["NodeID"]])
            for node in self._alive()
            if node["NodeID"] not in closed
        ]
        return Capacity(tuple(free)).ranks(dict(placement.bundle), placement.strategy) >= size

    def closed(self, placement: Placement) -> set[str]:
        """Returns the nodes that a new ring must avoid."""
        return self._shut(placement, dict(self._held))

    def take(self, holder: Hashable, placement: Placement, nodes: Sequence[str]) -> bool:
        """Gives a ring the nodes of its ranks; returns whether no other took one meanwhile."""
        within = placement.device == "cuda" and len(set(nodes)) == 1
        with self._lock:
            if self.closed(placement) & set(nodes):
                return False
            self._held[holder] = Counter(nodes), within
            return True

    def holds(self, holder: Hashable) -> bool:
        """Returns whether a holder has machines."""
        return holder in self._held

    def release(self, holder: Hashable) -> None:
        """Takes the machines of a holder back."""
        self._held.pop(holder, None)

    def _shut(
        self, placement: Placement, held: Mapping[Hashable, tuple[Counter[str], bool]]
    ) -> set[str]:
        """Returns the nodes of machines that a new ring must not share."""
        cuda = placement.device == "cuda"
        if cuda and self._shared:
            return set()
        # GPU rings that each lie within a machine do not disturb each other.
        alone = cuda and placement.strategy == "STRICT_PACK"
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._alive()}
        busy = {
            addresses.get(node)
            for ranks, within in held.values()
            if not (alone and within)
            for node in ranks
        }
        return {node for node, address in addresses.items() if address in busy}

    def _alive(self) -> list[Mapping[str, Any]]:
        return [node for node in self._nodes() if node["Alive"]]


def _group(node: Mapping[str, Any], placement: Placement, taken: int) -> NodeGroup:
    """Returns what a node has left when ``taken`` ranks have a bundle each."""
    has = node["Resources"]
    free = {name: has.get(name, 0.0) - taken * need for name, need in placement.bundle}
    return NodeGroup("node", free)
