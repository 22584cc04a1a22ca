"""Partitions: the rule that deals the positions of a sequence to the ranks of a ring.

A partition is one pure function ``ranges(seq_len, world_size, rank) -> tuple[range, ...]`` over a
*padded* sequence. The ranges of one rank share one step and are disjoint; the rank holds their
sorted union, in that order. Their number and step depend on the ring alone. Nothing else in ringray
knows a partition by name: intervals, FLOPs, traffic and balance follow from the ranges alone.

To add one: write ``ringray/partition/NAME.py`` with ``GRANULARITY`` (the padded length is a
multiple of ``GRANULARITY * world_size``) and ``ranges``, and add it to ``PARTITIONS``. The contract
suite in ``tests/contracts`` runs over every name registered here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringray.base.errors import unknown
from ringray.partition import contiguous, striped, zigzag, zigzag_token


@dataclass(frozen=True)
class Partition:
    """A named rule for dealing positions to ranks.

    ``granularity``: padded lengths are multiples of ``granularity * world_size`` tokens.
    ``ranges(padded_len, world_size, rank)``: the positions of one rank, a few ranges of equal step.
    """

    name: str
    granularity: int
    ranges: Callable[[int, int, int], tuple[range, ...]]


PARTITIONS: dict[str, Partition] = {
    name: Partition(name, module.GRANULARITY, module.ranges)
    for name, module in {
        "contiguous": contiguous,
        "striped": striped,
        "zigzag": zigzag,
        "zigzag-token": zigzag_token,
    }.items()
}
DEFAULT = "zigzag"


def get(name: str) -> Partition:
    """Returns the partition called ``name``; raises ValueError with the valid names otherwise."""
    try:
        return PARTITIONS[name]
    except (KeyError, TypeError):
        raise ValueError(unknown("partition", name, PARTITIONS)) from None


def padded_length(name: str, seq_len: int, world_size: int) -> int:
    """Returns ``seq_len`` rounded up to the next length (tokens) that ``name`` deals evenly."""
    unit = get(name).granularity * world_size
    return -(-seq_len // unit) * unit


def true_length(name: str, seq_len: int | None, rows: int, world_size: int) -> int:
    """Returns the true length (tokens) of a sequence whose shards have ``rows`` rows each: that is
    ``seq_len``, or all rows if it is None.

    Raises:
        ValueError: unknown partition, or a length that these shards cannot have.
    """
    padded = rows * world_size
    length = padded if seq_len is None else seq_len
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"seq_len: got {length!r}, expected None or an integer of at least 1")
    expected = padded_length(name, length, world_size)
    if expected != padded:
        raise ValueError(
            f"seq_len: {world_size} ranks x {rows} rows = {padded} positions, but partition "
            f"{name!r} deals {length} tokens as {expected} ({expected // world_size} rows a rank); "
            "pad and deal with ringray.shard"
        )
    return length
