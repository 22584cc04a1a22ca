"""What a tuning spec leaves open: every strategy that fits the ring and the heads, every cut."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ringray import transport as transports
from ringray.lab.kinds import KINDS
from ringray.lab.plan import kernel_cuts
from ringray.partition import PARTITIONS
from ringray.traffic import walk
from ringray.tuning import table as tuned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_TWO_DIMENSIONS = ("hybrid", "double-ring")
_ONLY_NAMED = ("staged",)  # for ranks that have no other way


def points(kind: str, chosen: Mapping[str, Any], device: str) -> Iterator[dict[str, Any]]:
    """What one point of a sweep stands for, as values of the fields that it leaves open: in
    ``strategy-tune`` those that are ``auto``, in ``kernel-tune`` no blocks. Elsewhere it stays
    open, to be looked up. ``device``: cpu or cuda."""
    if KINDS[kind].ranks_alone:
        alone = {"ring_size": 1, **tuned.DEFAULTS}
        given = chosen["blocks"]
        for cut in kernel_cuts.cuts(chosen, device) if given is None else [given]:
            yield {**alone, "blocks": cut}
    elif KINDS[kind].tunes:
        yield from _strategies(chosen)
    else:
        yield {}


def _strategies(chosen: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    open_fields = {
        "partition": list(PARTITIONS),
        "transport": _transports(chosen["ring_size"], chosen["heads"], chosen["kv_heads"]),
        "backward": _walks(chosen),
    }
    names = [name for name in open_fields if chosen[name] == "auto"]
    for values in itertools.product(*(open_fields[name] for name in names)):
        strategy = dict(zip(names, values, strict=True))
        if strategy.get("backward", "planned") == "planned" or _walk({**chosen, **strategy}):
            yield strategy


def _transports(ranks: int, heads: int, kv_heads: int) -> list[str]:
    """By name; those with two dimensions in every way in which they multiply out."""
    found = []
    for name in transports.TRANSPORTS:
        if name in _ONLY_NAMED:
            continue
        ways = [name]
        if name in _TWO_DIMENSIONS:
            ways = [f"{name}:{n}" for n in range(2, ranks) if ranks % n == 0]
        found += [way for way in ways if transports.check(way, ranks, heads, kv_heads) is None]
    return found


def _walk(chosen: Mapping[str, Any]) -> bool:
    """Whether the transport has chunks that walk, so that there are several ways back."""
    heads, kv_heads = chosen["heads"], chosen["kv_heads"]
    try:
        return transports.plan(chosen["transport"], chosen["ring_size"], heads, kv_heads).walks
    except ValueError:
        return False


def _walks(chosen: Mapping[str, Any]) -> list[str]:
    return list(walk.BACKWARDS) if chosen["direction"] == "forward+backward" else ["planned"]
