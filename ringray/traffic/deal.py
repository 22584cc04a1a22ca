"""What ``ringray.deal`` returns: the positions of every rank, dealt for one mask.

Imports numpy only.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ringray import partition as partitions
from ringray.base.units import plain
from ringray.partition import BALANCED, Dealt, Partitioning
from ringray.traffic import dealer, geometry
from ringray.traffic.mask import Mask, argument_of

Ints = NDArray[np.int64]
Ranges = tuple[tuple[range, ...], ...]
_NARROWER = ("window", "chunk", "global_tokens")  # fields by which layers of one model differ


@dataclass(frozen=True, eq=False, repr=False)
class Deal(Dealt):
    """The positions of every rank, dealt for one mask; equal if all of it is equal.

    ``mask``: of the sequence. ``world_size``: ranks. ``rule``: the partition that dealt. ``dealt``:
    the positions of each rank, disjoint ranges of one step, padding included.
    """

    mask: Mask
    world_size: int
    rule: str
    dealt: Ranges
    weights: tuple[float, ...]

    #: True length, and the length that is dealt, padding included (tokens).
    seq_len: int = field(init=False)
    padded: int = field(init=False)

    #: 62 bits that another deal does not have, int64 (1,): code that is compiled takes them along.
    token: Ints = field(init=False)

    def __post_init__(self) -> None:
        text = repr((self.mask, self.world_size, self.rule, self.weights, self.dealt))
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2
        derived: dict[str, object] = {
            "seq_len": self.mask.seq_len,
            "padded": sum(map(len, self.dealt[0])) * self.world_size,
            "token": np.array([digest]),
        }
        # An equal one before stands for it, and lives as long as it does.
        first = _DEALS.setdefault(digest, self)
        derived["_first"] = None if first is self else first
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        return Deal, (self.mask, self.world_size, self.rule, self.dealt, self.weights)

    @property
    def digest(self) -> int:
        """Returns the number in ``token``."""
        return int(self.token[0])

    def __hash__(self) -> int:
        return self.digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deal) and self.digest == other.digest

    def __repr__(self) -> str:
        # What differs comes first: messages may cut the rest.
        size = f"{self.seq_len} tokens on {self.world_size} ranks"
        return f"Deal({self.digest:016x}: {self.rule}, {size})"

    def ranges(self, rank: int) -> tuple[range, ...]:
        """Returns the positions of a rank: disjoint ranges of one step, in ascending order; those
        from ``seq_len`` on are padding. Raises ValueError for a rank outside the ring."""
        if rank not in range(self.world_size):
            raise ValueError(f"rank: got {rank!r}, expected 0 to {self.world_size - 1}")
        return self.dealt[rank]

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Returns the visible (query, key) pairs of each rank's queries."""
        return tuple(self._pairs.visible.sum(1).tolist())

    @property
    def balance(self) -> float:
        """Returns the mean time of a rank over the longest, from 0 to 1: its work over its weight,
        where 1 is even."""
        times = np.array(self.work) / np.array(self.weights)
        return float(sum(self.work) / sum(self.weights) / times.max())

    @cached_property
    def rows_received(self) -> tuple[int, ...]:
        """Returns the rows of K/V that each rank needs from others."""
        pairs = self._pairs
        rows = pairs.runs.rows if pairs.runs else np.maximum(pairs.stop - pairs.first, 0).sum(0)
        return tuple((rows.sum(1) - rows.diagonal()).tolist())

    def documents(self, rank: int) -> tuple[int, ...]:
        """Returns the numbers of the documents, from 0 on, that have tokens on a rank; of the first
        batch row, where rows hold documents of their own."""
        bounds = np.array(self.mask.rows[0].boundaries)
        tokens = [np.arange(x.start, min(x.stop, self.seq_len), x.step) for x in self.ranges(rank)]
        held = np.searchsorted(bounds, np.concatenate(tokens), side="right") - 1
        return tuple(np.unique(held).tolist())

    def indices(self) -> list[int]:
        """Returns all positions, those of rank 0 first, each rank's in ascending order: the form of
        PyTorch's load balancers, whose rank r holds the r-th of equal parts."""
        return [p for ranges in self.dealt for p in sorted(itertools.chain(*ranges))]

    @cached_property
    def _pairs(self) -> geometry.Pairs:
        return geometry.pairs(geometry.Layout(self, self.padded, self.world_size), self.mask)

    def check_mask(self, mask: Mask) -> None:
        """Raises ValueError if this was dealt for another mask. A layer may see less than what was
        dealt for, by its window or its chunk, and global tokens beside them."""
        for name in (item.name for item in fields(Mask)):
            here, there = getattr(mask, name), getattr(self.mask, name)
            alike = here == there or (name in _NARROWER and there is None)
            if not alike and not (name == "documents" and _ends(mask) == _ends(self.mask)):
                raise ValueError(
                    f"partition: dealt for {argument_of(name)} {_brief(there)}, but the call has "
                    f"{_brief(here)}"
                )


del Deal.__dataclass_fields__  # FSDP copies dataclasses among the arguments of modules

_DEALS: WeakValueDictionary[int, Deal] = WeakValueDictionary()  # of this process, by digest


@lru_cache(maxsize=64)  # a backward pass comes after its caller may have dropped the deal
def by_digest(digest: int) -> Deal:
    """Returns the deal of this process that has that digest."""
    return _DEALS[digest]


def _ends(mask: Mask) -> list[set[int]]:
    """Returns the boundaries of each batch row; documents without a token change none."""
    return [set(row.boundaries) for row in mask.rows]


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:40]} ... {text[-15:]}"


def speeds(weights: Any, world_size: int) -> tuple[float, ...]:
    """Returns the weight of each rank as a number of Python's; None is 1 for all.

    Raises:
        ValueError: weights that are not a positive number for each rank.
    """
    if weights is None:
        return (1.0,) * world_size
    several = isinstance(weights, Iterable) and not isinstance(weights, bytes | Mapping)
    values = tuple(map(plain, weights)) if several else ()
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)
    most = sys.float_info.max / world_size  # of which the sum is one, too
    if not numbers or len(values) != world_size or not all(0 < x <= most for x in values):
        raise ValueError(
            f"weights: got {_brief(weights)}, expected a positive number for each of {world_size} "
            "ranks"
        )
    return tuple(map(float, values))


@lru_cache(maxsize=64)
def deal(
    mask: Mask, world_size: int, rule: str = BALANCED, weights: tuple[float, ...] | None = None
) -> Deal:
    """Returns the positions of every rank, the same for equal arguments. ``weights``: of
    ``speeds``.

    Raises:
        ValueError: an unknown partition.
    """
    weights = weights or speeds(None, world_size)
    padded = partitions.padded_length(rule, mask.seq_len, world_size)
    if rule != BALANCED:
        ranges = partitions.get(rule).ranges
        dealt = tuple(ranges(padded, world_size, rank) for rank in range(world_size))
        return Deal(mask, world_size, rule, dealt, weights)
    pieces: list[list[range]] = [[] for _ in range(world_size)]
    for begin, stop, rank in dealer.deal(mask, padded, weights):
        pieces[rank].append(range(begin, stop))
    return Deal(mask, world_size, rule, tuple(map(tuple, pieces)), weights)


def resolved(partition: Partitioning, mask: Mask, world_size: int) -> Partitioning:
    """Returns the partition of a call: ``balanced`` dealt for its mask, others as they are.

    A call that only names ``balanced`` deals for what the masks of all layers of its model have in
    common, so that layers with and without a window agree.

    Raises:
        ValueError: what is dealt is for another length, ring or mask.
    """
    if isinstance(partition, Deal):
        partitions.padded_length(partition, mask.seq_len, world_size)  # checks both
        partition.check_mask(mask)
        return partition if partition.rule not in partitions.PARTITIONS else partition.rule
    if partition != BALANCED:
        return partition
    shared = None if mask.documents is None else mask.shared_prefix
    common = replace(mask, window=None, chunk=None, global_tokens=None, shared_prefix=shared)
    return deal(common, world_size)


def of_indices(indices: Any, mask: Mask, world_size: int, weights: tuple[float, ...]) -> Deal:
    """Returns the deal in which rank r holds the r-th of equal parts of ``indices``: the form of
    PyTorch's load balancers, which have one row for all batch rows.

    Raises:
        ValueError: they are not every position once, do not divide by the ranks, or a rank's do
            not ascend.
    """
    names = partitions.NAMES
    lengths = {partitions.padded_length(name, mask.seq_len, world_size) for name in names}
    try:
        positions = np.asarray(indices)
    except ValueError:  # rows of different lengths
        positions = np.empty(0)
    positions = positions[0] if positions.ndim == 2 and len(positions) == 1 else positions
    whole = positions.ndim == 1 and positions.dtype.kind in "iu" and len(positions) in lengths
    if not whole or not np.array_equal(np.sort(positions), np.arange(len(positions))):
        raise ValueError(
            f"partition: got {_brief(indices)}, expected a name, or each of the positions 0 to "
            f"{min(lengths) - 1} once: {mask.seq_len} tokens, padded for {world_size} ranks"
        )
    parts = positions.reshape(world_size, -1)
    (falling,) = np.nonzero((np.diff(parts) < 0).any(1))
    if len(falling):
        raise ValueError(
            f"partition: got {_brief(parts[falling[0]].tolist())} for rank {falling[0]}, expected "
            "the positions of each rank in ascending order; sort each part"
        )
    dealt = []
    for part in parts:
        (ends,) = np.nonzero(np.diff(part) != 1)
        starts, stops = part[np.append(0, ends + 1)], part[np.append(ends, len(part) - 1)] + 1
        dealt.append(tuple(map(range, starts.tolist(), stops.tolist())))
    return Deal(mask, world_size, "indices", tuple(dealt), weights)
