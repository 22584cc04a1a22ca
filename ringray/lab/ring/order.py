"""The order of ranks along a ring: neighbours share a link, a node, a rack.

Racks and domains come from the labels of Ray's nodes (``ray start --labels``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringray.lab.trial.config import shuffled

# Labels, from far to near.
ZONES = (
    "ray.io/availability-region",
    "ray.io/availability-zone",
    "ringray.io/rack",
    "ringray.io/domain",
)


@dataclass(frozen=True)
class RankLocation:
    """The place of a rank. ``node``: Ray's id; ``zones``: values of ``ZONES``, empty where a node
    has none; ``gpu``: its number there, of one length."""

    node: str
    zones: tuple[str, ...] = ("",) * len(ZONES)
    gpu: str = ""


def zones_of(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the values of ``ZONES`` among a node's labels."""
    return tuple(labels.get(name, "") for name in ZONES)


def ordered(
    locations: Sequence[RankLocation],
    size: int,
    order: str = "topology",
    inner: int = 1,
    seed: int = 0,
) -> list[int]:
    """Returns the ranks at ``locations``, of which the first ``size`` form the ring in this order.

    ``topology``: by zones, then node, largest first, then GPU, so a ring crosses each boundary once
    per direction; groups of ``inner`` neighbours lie on one node while nodes
    hold whole ones. ``given``: as they are. ``shuffled``: those of ``topology``, by ``seed``.
    """
    if order == "given":
        return list(range(len(locations)))
    by_node: dict[str, list[int]] = {}
    for number, location in enumerate(locations):
        by_node.setdefault(location.node, []).append(number)
    nodes = sorted(by_node.values(), key=lambda some: (locations[some[0]].zones, -len(some)))
    chosen: list[int] = []
    remaining: list[int] = []
    for some in nodes:
        chain = sorted(some, key=lambda number: locations[number].gpu)
        whole = len(some) - len(some) % inner
        chosen += chain[:whole]
        remaining += chain[whole:]
    chosen += remaining
    if order == "shuffled":
        chosen[:size] = [chosen[number] for number in shuffled(size, seed)]
    return chosen


def crossings(nodes: Sequence[str]) -> int:
    """Returns how often a ring of ranks on these nodes crosses from one node to another."""
    return sum(a != b for a, b in zip(nodes, [*nodes[1:], *nodes[:1]], strict=True))


def divided(nodes: Sequence[str], inner: int) -> int:
    """Returns how many groups of ``inner`` neighbours lie on several nodes."""
    groups = (nodes[start : start + inner] for start in range(0, len(nodes), inner))
    return sum(len(set(group)) > 1 for group in groups)
