"""Links between the nodes of a cluster, as ``ringray doctor --cluster`` has measured them.

Which of them are slow, and the one that stands for all in the cost model. No torch, no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from statistics import median, median_high, median_low
from typing import Any, Literal

from ringray.base import units
from ringray.lab.predict.hardware import FrozenModel, Hardware, Link, Positive, Rate

_Speeds = dict[tuple[int, int], float]  # by pair: the more, the better

_SLOW = 2.0  # times less than the median: bytes/s of an outlier
_LATE = 5.0  # times more than the median: latency of an outlier


class LinkedNode(FrozenModel):
    """One node. ``name``: its address, with the start of Ray's id where several share one;
    ``environment``: what measurements on it depend on; ``lost``: why it was not measured."""

    name: str
    environment: Mapping[str, Any] = {}
    lost: str | None = None


class NodePair(FrozenModel):
    """The link between two of the ``nodes``, both ways at once. ``device``: ``cuda`` if GPUs sent
    (NCCL), else ``cpu`` (gloo); ``bandwidth``: bytes/s, one way; ``latency``: seconds of a small
    message; ``error``: why it was not measured."""

    nodes: tuple[int, int]
    device: Literal["cpu", "cuda"]
    bandwidth: Rate = 1.0
    latency: Positive = 1.0
    error: str | None = None


class ClusterLinks(FrozenModel):
    """All pairs of ``nodes``. ``measured``: when, in UTC."""

    measured: str
    nodes: tuple[LinkedNode, ...]
    pairs: tuple[NodePair, ...]

    def measured_by(self, device: str) -> list[NodePair]:
        """Returns the pairs that were measured by messages of ``device``."""
        return [pair for pair in self.pairs if pair.error is None and pair.device == device]

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each node and pair that was not measured."""
        names = [node.name for node in self.nodes]
        yield from (f"{node.name}: {node.lost}" for node in self.nodes if node.lost)
        for pair in self.pairs:
            if pair.error and not any(self.nodes[node].lost for node in pair.nodes):
                yield f"{' ↔ '.join(names[node] for node in pair.nodes)}: {pair.error}"

    def outliers(self) -> Iterator[str]:
        """Yields a sentence for each slow node, then for each slow pair of others: of bandwidth,
        then of latency."""
        for device in ("cuda", "cpu"):
            pairs = self.measured_by(device)
            rates = {pair.nodes: pair.bandwidth for pair in pairs}
            answers = {pair.nodes: 1 / pair.latency for pair in pairs}
            yield from self._slow(rates, _SLOW, "slow to", units.bandwidth)
            yield from self._slow(
                answers, _LATE, "far from", lambda speed: f"{units.latency(1 / speed)} latency"
            )

    def _slow(
        self, speeds: _Speeds, times: float, word: str, written: Callable[[float], str]
    ) -> Iterator[str]:
        """Yields what is ``times`` slower than the median of the others: a node by the best of its
        pairs, then pairs of other nodes."""
        names, slow = [node.name for node in self.nodes], set[int]()
        for node in range(len(names)):
            mine = [speed for pair, speed in speeds.items() if node in pair]
            apart = [speed for pair, speed in speeds.items() if node not in pair]
            if len(mine) > 1 and apart and max(mine) * times < median(apart):
                slow.add(node)
                both = f"{written(median(mine))}, the median is {written(median(apart))}"
                yield f"{names[node]} is {word} all others: {both}"
        others = {pair: speed for pair, speed in speeds.items() if not slow & {*pair}}
        usual = median(others.values()) if others else 0.0
        for (first, second), speed in sorted(others.items(), key=itemgetter(1)):
            if speed * times < usual:
                both = f"{names[first]} ↔ {names[second]}"
                yield f"{both}: {written(speed)}, the median is {written(usual)}"

    def link(self, hardware: Hardware) -> Link | None:
        """Returns the link of the node with the slowest usual one, because a ring visits all nodes;
        None if none was measured on such hardware."""
        pairs = self.measured_by("cuda" if hardware.cores is None else "cpu")
        nodes = {node for pair in pairs for node in pair.nodes}
        if not nodes:
            return None
        mine = [[pair for pair in pairs if node in pair.nodes] for node in nodes]
        bandwidth = min(median_low(pair.bandwidth for pair in some) for some in mine)
        latency = max(median_high(pair.latency for pair in some) for some in mine)
        # As measured: it may lie beyond the bounds of what is written in a file.
        ranks = hardware.outer.ranks
        return Link.model_construct(bandwidth=bandwidth, latency=latency, ranks=ranks)
