"""The nodes that a cluster has or can grow to, and the rings that fit on them. Plain data, no ray.

The ranks of a ring are alike, so a count tells whether they fit: ranks that a node of each group
holds, times the nodes of the group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

HEAD = "node:__internal_head__"  # the resource by which Ray marks its head node
_SHOWN = ("CPU", "GPU")  # resources that messages show
_ROUNDING = 1e-6  # resources may be fractions


@dataclass(frozen=True)
class Placement:
    """The needs of each rank of a ring."""

    device: str  # cpu or cuda
    strategy: str  # PACK, SPREAD, STRICT_PACK or STRICT_SPREAD, as Ray's placement groups
    bundle: tuple[tuple[str, float], ...]  # Ray resources
    memory: int | None = None  # bytes beyond its usage at the start, None without a limit


def counts(resources: Mapping[str, float]) -> list[str]:
    """Returns the CPUs and GPUs among Ray resources, in words."""
    return [f"{resources[name]:g} {name}" for name in _SHOWN if resources.get(name)]


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that are alike."""

    name: str
    resources: Mapping[str, float] = field(default_factory=dict)  # of each
    limit: float = 1  # nodes that there can be
    head: bool = False  # the cluster's head node, which a limit on workers does not count

    def ranks(self, bundle: Mapping[str, float]) -> int:
        """Returns how many ranks, with a bundle each, one such node holds."""
        shares = [self.resources.get(name, 0.0) / need for name, need in bundle.items() if need > 0]
        return max(0, int(min(shares, default=0.0) + _ROUNDING))

    def __str__(self) -> str:
        has = ", ".join(counts(self.resources)) or "no CPU, no GPU"
        many = "any number of" if self.limit == math.inf else f"{self.limit} ×"
        return f"{many} {self.name} ({has})"


@dataclass(frozen=True)
class Capacity:
    """The nodes of a cluster."""

    groups: tuple[NodeGroup, ...]
    worker_limit: float = math.inf  # of all groups together

    def has(self, name: str) -> bool:
        """Returns whether a node can have at least 1 of a resource."""
        return any(
            group.resources.get(name, 0.0) >= 1 and self._can_be(group) for group in self.groups
        )

    def ranks(self, bundle: Mapping[str, float], strategy: str = "PACK") -> float:
        """Returns the size of the largest ring that fits; infinite without a limit.

        Args:
            bundle: Ray resources of one rank.
            strategy: as in :class:`Placement`.
        """
        possible = [group for group in self.groups if self._can_be(group)]
        holding = [(ranks, group) for group in possible if (ranks := group.ranks(bundle))]
        if strategy == "STRICT_PACK":
            return max((ranks for ranks, _ in holding), default=0)
        if strategy == "STRICT_SPREAD":
            holding = [(1, group) for _, group in holding]
        # If workers are limited, those that hold the most ranks come first.
        holding.sort(key=lambda pair: -pair[0])
        workers = self.worker_limit
        total = 0.0
        for ranks, group in holding:
            nodes = group.limit
            if not group.head:
                nodes = min(nodes, workers)
                workers -= nodes
            total += ranks * nodes
        return total

    def _can_be(self, group: NodeGroup) -> bool:
        return group.limit != 0 and (group.head or self.worker_limit != 0)

    def __str__(self) -> str:
        there = [group for group in self.groups if self._can_be(group)]
        # A head that holds no rank is shown only if there is nothing else.
        shown = [group for group in there if not group.head or group.resources.get("CPU")] or there
        text = ", ".join(map(str, shown)) or "no nodes"
        if sum(group.limit for group in there if not group.head) > self.worker_limit:
            text += f", at most {self.worker_limit} workers in all"
        return text


def from_nodes(nodes: Iterable[Mapping[str, Any]]) -> Capacity:
    """Makes the capacity of ``ray.nodes()``: nodes with the same resources are one group."""
    living = [node["Resources"] for node in nodes if node["Alive"]]
    alike = Counter(
        (HEAD in has, tuple(float(has.get(name, 0.0)) for name in _SHOWN)) for has in living
    )
    groups = []
    for (head, amounts), count in alike.items():
        resources = dict(zip(_SHOWN, amounts, strict=True))
        groups.append(NodeGroup("head" if head else "node", resources, count, head))
    return Capacity(tuple(groups))


def from_config(config: Mapping[str, Any], present: Capacity) -> Capacity:
    """Makes the capacity of an autoscaler's configuration and the present head.

    Args:
        config: as the autoscaler reads it: the YAML of ``ray up``, or a RayCluster in that form.
        present: the present nodes; the head counts with its real resources.
    """
    worker_limit = config.get("max_workers")
    if worker_limit is None:  # not written, or null
        worker_limit = math.inf
    types: Mapping[str, Any] = config.get("available_node_types") or {}
    head = config.get("head_node_type") or (next(iter(types)) if len(types) == 1 else None)
    groups = [group for group in present.groups if group.head]
    for name, kind in types.items():
        resources = {key: float(value) for key, value in (kind.get("resources") or {}).items()}
        limit = kind.get("max_workers")
        if limit is None:
            limit = 0 if name == head else worker_limit
        groups.append(NodeGroup(name, resources, limit))
    return Capacity(tuple(groups), worker_limit)
