"""Links between the nodes of a cluster, as ``ringray doctor --cluster`` has measured them.

Which of them are slow, and the one that stands for all in the cost model. No torch, no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from statistics import median, median_high, median_low
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ringray.base import units
from ringray.lab.predict.hardware import Hardware, Link, Positive, Rate

_Speeds = dict[tuple[int, int], float]  # by pair: the more, the better

_SLOW = 2.0  # times less than the median: bytes/s of an outlier
_LATE = 5.0  # times more than the median: latency of an outlier


class LinkedNode(BaseModel):
    """One node. ``name``: its address, with the start of Ray's id where several share one;
    ``environment``: what measurements on it depend on; ``lost``: why it was not measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    environment: Mapping[str, Any] = {}
    lost: str | None = None


class NodePair(BaseModel):
    """The link between two of the ``nodes``, both ways at once. ``device``: ``cuda`` if GPUs sent
    (NCCL), else ``cpu`` (gloo); ``bandwidth``: bytes/s, one way; ``latency``: seconds of a small
    message; ``error``: why it was not measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    nodes: tuple[int, int]
    device: Literal["cpu", "cuda"]
    bandwidth: Rate = 1.0
    latency: Positive = 1.0
    error: str | None = None


class ClusterLinks(BaseModel):
    """All pairs of ``nodes``. ``measured``: when, in UTC."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    measured: str
    nodes: tuple[LinkedNode, ...]
    pairs: tuple[NodePair, ...]

    def of(self, device: str) -> list[NodePair]:
        """Returns the pairs that were measured by messages of ``device``."""
        return [one for one in self.pairs if one.error is None and one.device == device]

    def problems(self) -> Iterator[str]:
        """Yields a sentence for each node and pair that was not measured."""
        names = [node.name for node in self.nodes]
        yield from (f"{node.name}: {node.lost}" for node in self.nodes if node.lost)
        for one in self.pairs:
            if one.error and not any(self.nodes[at].lost for at in one.nodes):
                yield f"{' ↔ '.join(names[at] for at in one.nodes)}: {one.error}"

    def outliers(self) -> Iterator[str]:
        """Yields a sentence for each slow node, then for each slow pair of others: of bandwidth,
        then of latency."""
        for device in ("cuda", "cpu"):
            pairs = self.of(device)
            rates = {one.nodes: one.bandwidth for one in pairs}
            answers = {one.nodes: 1 / one.latency for one in pairs}
            yield from self._slow(rates, _SLOW, "slow to", units.bandwidth)
            yield from self._slow(
                answers, _LATE, "far from", lambda speed: f"{units.latency(1 / speed)} latency"
            )

    def _slow(
        self, speeds: _Speeds, times: float, word: str, said: Callable[[float], str]
    ) -> Iterator[str]:
        """Yields what is ``times`` slower than the median of the pairs without slow nodes."""
        names, left, slow = [node.name for node in self.nodes], speeds, dict[int, str]()
        while (at := _slowest(left, times)) is not None:
            slow[at] = said(median(speed for pair, speed in speeds.items() if at in pair))
            left = _without(left, at)
        usual = median(left.values()) if left else 0.0
        for at, mine in slow.items():
            yield f"{names[at]} is {word} all others: {mine}, the median is {said(usual)}"
        for (one, other), speed in sorted(left.items(), key=itemgetter(1)):
            if speed * times < usual:
                yield f"{names[one]} ↔ {names[other]}: {said(speed)}, the median is {said(usual)}"

    def link(self, hardware: Hardware) -> Link | None:
        """Returns the link of the node with the slowest usual one, because a ring visits all nodes;
        None if none was measured on such hardware."""
        pairs = self.of("cuda" if hardware.cores is None else "cpu")
        nodes = {at for one in pairs for at in one.nodes}
        if not nodes:
            return None
        mine = [[one for one in pairs if at in one.nodes] for at in nodes]
        return Link(
            bandwidth=min(median_low(one.bandwidth for one in some) for some in mine),
            latency=max(median_high(one.latency for one in some) for some in mine),
            ranks=hardware.outer.ranks,
        )


def _slowest(speeds: _Speeds, times: float) -> int | None:
    """Returns the node whose best pair, of several, is slowest, if it is ``times`` slower than the
    median of the pairs of others."""
    mine: dict[int, list[float]] = {}
    for pair, speed in speeds.items():
        for at in pair:
            mine.setdefault(at, []).append(speed)
    best = {at: max(some) for at, some in mine.items() if len(some) > 1}
    if not best:
        return None
    at = min(best, key=best.__getitem__)
    others = _without(speeds, at).values()
    return at if others and best[at] * times < median(others) else None


def _without(speeds: _Speeds, at: int) -> _Speeds:
    return {pair: speed for pair, speed in speeds.items() if at not in pair}
