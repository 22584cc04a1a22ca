"""Partitions: the rule that deals the positions of a sequence to the ranks of a ring.

A partition is one pure function ``ranges(seq_len, world_size, rank) -> tuple[range, ...]`` over a
*padded* sequence. The ranges of one rank share one step and are disjoint; the rank holds their
sorted union, in that order. Their number and step depend on the ring alone. Nothing else in ringray
knows a partition by name: intervals, FLOPs, traffic and balance follow from the ranges alone.

To add one: write ``ringray/partition/NAME.py`` with ``GRANULARITY`` (the padded length is a
multiple of ``GRANULARITY * world_size``) and ``ranges``, and add it to ``PARTITIONS``. The contract
suite in ``tests/contracts`` runs over every name registered here.

The partition ``balanced`` is no rule of the ring alone: it depends on the mask, and is dealt piece
by piece (``ringray.deal``). What it returns stands wherever a name does.
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
BALANCED = "balanced"
NAMES = (*PARTITIONS, BALANCED)


class Dealt:
    """A sequence of ``seq_len`` tokens, ``padded`` to a length that ``world_size`` ranks share
    evenly, whose positions are dealt already."""

    seq_len: int
    world_size: int
    padded: int

    def ranges(self, rank: int) -> tuple[range, ...]:
        """Returns the positions of a rank: disjoint ranges of one step, padding included."""
        raise NotImplementedError  # an abstract base class would break graphs of torch.compile


Partitioning = str | Dealt


def _undealt(*_: int) -> tuple[range, ...]:
    raise ValueError(
        f"partition: got {BALANCED!r} alone, expected ringray.deal(...), because it depends on the "
        "mask, which this call does not know"
    )


def get(partition: Partitioning) -> Partition:
    """Returns the partition of that name, or the one that is dealt; raises ValueError with the
    valid names otherwise."""
    if isinstance(partition, Dealt):
        return Partition(str(partition), 1, lambda _, __, rank: partition.ranges(rank))
    if partition == BALANCED:
        return Partition(BALANCED, 1, _undealt)
    try:
        return PARTITIONS[partition]
    except (KeyError, TypeError):
        raise ValueError(unknown("partition", partition, NAMES)) from None


def padded_length(partition: Partitioning, seq_len: int, world_size: int) -> int:
    """Returns ``seq_len`` rounded up to the next length (tokens) that is dealt evenly.

    Raises:
        ValueError: unknown partition, or one that is dealt for another length or ring.
    """
    if isinstance(partition, Dealt):
        for name, dealt, value in (
            ("seq_len", partition.seq_len, seq_len),
            ("world_size", partition.world_size, world_size),
        ):
            if dealt != value:
                raise ValueError(f"partition: got {partition}, but {name} is {value} here")
        return partition.padded
    unit = get(partition).granularity * world_size
    return -(-seq_len // unit) * unit


def dealt_length(partition: Partitioning) -> int | None:
    """Returns the true length (tokens) of a sequence that is dealt; None for a name."""
    return partition.seq_len if isinstance(partition, Dealt) else None


def true_length(partition: Partitioning, seq_len: int | None, rows: int, world_size: int) -> int:
    """Returns the true length (tokens) of a sequence whose shards have ``rows`` rows each: that is
    ``seq_len``; if it is None the length that is dealt, or all rows.

    Raises:
        ValueError: unknown partition, or a length that these shards cannot have.
    """
    padded = rows * world_size
    length = seq_len
    if length is None:
        length = dealt_length(partition) or padded
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"seq_len: got {length!r}, expected None or an integer of at least 1")
    expected = padded_length(partition, length, world_size)
    if expected != padded:
        raise ValueError(
            f"seq_len: {world_size} ranks x {rows} rows = {padded} positions, but partition "
            f"{get(partition).name!r} deals {length} tokens as {expected} "
            f"({expected // world_size} rows a rank); pad and deal with ringray.shard"
        )
    return length
