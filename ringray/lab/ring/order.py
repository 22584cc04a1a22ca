"""The order of ranks along a ring: neighbours share a link, a node, a rack.

Racks and domains come from the labels of Ray's nodes (``ray start --labels``), links between the
GPUs of a node from NVML.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ringray.base.errors import PlaceError
from ringray.lab.trial.config import shuffled

_ZONED = "ray.io/availability-region", "ray.io/availability-zone"
ZONES = (*_ZONED, "ringray.io/rack", "ringray.io/domain")  # labels, from far to near
_UNIQUE = {1, 3}  # of these: one name, one place; racks of two zones may have one name
_TRIED = 8  # GPUs of a node whose every order is compared
NVLINK = 100  # more than any path over PCI; NVML's levels go from 0 (one board) to 50 (two sockets)


@dataclass(frozen=True)
class RankLocation:
    """The place of a rank. ``node``: Ray's id; ``zones``: values of ``ZONES``, empty where a node
    has none; ``gpu``: UUID; ``links``: closeness of the node's other GPUs by UUID; ``name``: of the
    node, for people; ``bundle``: index in the placement group; ``log``: path of its stderr."""

    node: str
    zones: tuple[str, ...] = ("",) * len(ZONES)
    gpu: str = ""
    links: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    bundle: int = 0
    log: str = ""


def zones_of(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the values of ``ZONES`` among a node's labels."""
    return tuple(labels.get(name, "") for name in ZONES)


def gpu_links(uuid: str) -> dict[str, int]:
    """Returns the closeness of a node's other GPUs to this one by UUID; empty without NVML."""
    closeness: dict[str, int] = {}
    with suppress(Exception):  # no NVML, or an error of one of many drivers
        import pynvml

        pynvml.nvmlInit()
        own = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        others = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        by_uuid = {pynvml.nvmlDeviceGetUUID(gpu): gpu for gpu in others}
        for name in by_uuid.keys() - {uuid}:
            with suppress(pynvml.NVMLError):  # of this pair
                pair = own, by_uuid[name]
                linked = pynvml.nvmlDeviceGetP2PStatus(*pair, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
                near = NVLINK * (linked == pynvml.NVML_P2P_STATUS_OK)
                closeness[name] = near - int(pynvml.nvmlDeviceGetTopologyCommonAncestor(*pair))
    return closeness


def check(locations: Sequence[RankLocation]) -> None:
    """Raises PlaceError if labels contradict each other."""
    inside: dict[tuple[int, str], RankLocation] = {}
    for location in locations:
        for level in _UNIQUE:
            if not (name := location.zones[level]) or not location.zones[level - 1]:
                continue
            other = inside.setdefault((level, name), location)
            if other.zones[level - 1] != location.zones[level - 1]:
                raise PlaceError(
                    f"labels contradict: {ZONES[level]} {name!r} is in {ZONES[level - 1]} "
                    f"{other.zones[level - 1]!r} by node {other.node[:8]} and in "
                    f"{location.zones[level - 1]!r} by node {location.node[:8]}"
                )


def ordered(
    locations: Sequence[RankLocation],
    size: int,
    order: str = "topology",
    inner: int = 1,
    seed: int = 0,
) -> list[int]:
    """Returns the ranks at ``locations``, of which the first ``size`` form the ring in this order.

    ``topology``: by zones, then node, largest first, then links within the node, so a ring crosses
    each boundary once per direction; groups of ``inner`` neighbours lie on one node while nodes
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
        chain, whole = _chain(locations, some), len(some) - len(some) % inner
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


def _chain(locations: Sequence[RankLocation], some: list[int]) -> list[int]:
    """Returns the ranks of one node, so that neighbours have the closest links."""
    distances = {near for number in some for near in locations[number].links.values()}
    if len(distances) < 2 or len(some) > _TRIED:
        return some

    def closeness(chain: tuple[int, ...]) -> int:
        return sum(
            locations[a].links.get(locations[b].gpu, 0) for a, b in itertools.pairwise(chain)
        )

    first, *others = some
    chains: list[tuple[int, ...]] = [(first, *rest) for rest in itertools.permutations(others)]
    best = max(chains, key=closeness)
    return list(best)
