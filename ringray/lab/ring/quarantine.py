"""Nodes on which rings fail, and which get no further ranks."""

from __future__ import annotations

from collections.abc import Iterable

from ringray.lab.trial.faults import GONE, Fault


class Quarantine:
    """The nodes that one run avoids, by Ray's ids.

    A node that is lost or preempted is avoided at once, because Ray may take a while to notice the
    loss. Another node is avoided after ``STRIKES`` infrastructure faults with fewer than ``CLEARS``
    good trials between.
    """

    STRIKES = 2
    CLEARS = 20

    def __init__(self) -> None:
        self._strikes: dict[str, int] = {}
        self._since: dict[str, int] = {}  # good trials since the last strike
        self._nodes: dict[str, None] = {}

    @property
    def nodes(self) -> tuple[str, ...]:
        """Returns the nodes that get no further ranks."""
        return tuple(self._nodes)

    def add(self, node: str) -> None:
        """Puts no further ranks on ``node``."""
        self._nodes[node] = None

    def succeeded(self, nodes: Iterable[str]) -> None:
        """Counts a trial that ended with a result on ``nodes``."""
        for node in self._strikes.keys() & set(nodes):
            self._since[node] += 1
            if self._since[node] >= self.CLEARS:
                del self._strikes[node]

    def failed(self, fault: Fault) -> bool:
        """Counts a fault; returns whether its node should be avoided if the ring fits elsewhere."""
        node = fault.node_id
        if not node or node in self._nodes or not fault.infrastructure:
            return False
        self._strikes[node] = self._strikes.get(node, 0) + 1
        self._since[node] = 0
        return fault.kind in GONE or self._strikes[node] >= self.STRIKES
