"""The walk of K/V (and of dK/dV) around the ring: which rows each message carries.

Every chunk (one rank's K/V) walks the ring in one direction, and each message carries only the hull
of the rows that some rank further on still needs. The planner counts these messages and the ring
sends them: both read the same tables. Imports numpy only.

Hop h of a chunk takes it to the rank ``owner + h * direction``; hop 0 is its owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from ringray import geometry

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

Pass = Literal["forward", "backward"]


class Rows(NamedTuple):
    """A half-open range of local key rows of a chunk's owner; empty when ``stop <= start``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many rows."""
        return max(0, self.stop - self.start)

    def __bool__(self) -> bool:
        return self.stop > self.start


class Hop(NamedTuple):
    """What one rank does at one hop.

    It computes with the rows ``need`` of chunk ``owner``, of which it holds ``held``; meanwhile
    ``forward`` of them go on to the next rank. In backward the travelling sum of dK/dV arrives with
    rows ``sum_in``, gains this rank's share and leaves with rows ``sum_out`` to rank ``sum_to``.
    """

    owner: int
    held: Rows
    need: Rows
    forward: Rows
    sum_in: Rows
    sum_out: Rows
    sum_to: int


@dataclass(frozen=True)
class Walk:
    """One direction's walk for a whole ring.

    ``hops[rank]``: that rank's hops, own chunk first; trailing hops at which nothing moves or is
    computed anywhere are dropped. ``kv_rows``, ``sum_rows``: rows sent by all ranks together (one
    row is one position of K and V, or of dK and dV). ``home[rank]``: rows of the rank's own dK/dV
    that come home, and who sends them (``None`` if no other rank saw them), and at which hop.
    """

    direction: int
    hops: tuple[tuple[Hop, ...], ...]
    home: tuple[tuple[Rows, int, int] | None, ...]
    sent: Sent


@lru_cache(maxsize=64)
def _route(world_size: int, direction: int) -> Ints:
    """Flat indices that turn ``[query rank, key rank]`` into ``[key rank, hop]``: hop h of chunk s
    is at rank s + h * direction."""
    owner, hop = np.arange(world_size)[:, None], np.arange(world_size)[None, :]
    return ((owner + direction * hop) % world_size) * world_size + owner


@lru_cache(maxsize=64)
def chunk_at(world_size: int, direction: int) -> Ints:
    """``[rank, hop]``: whose chunk a rank holds at a hop."""
    rank, hop = np.arange(world_size)[:, None], np.arange(world_size)[None, :]
    owners: Ints = (rank - direction * hop) % world_size
    return owners


@dataclass(frozen=True)
class Traffic:
    """Hulls per chunk and hop, ``[owner, hop]``; an empty hull has ``start = padded, stop = 0``.

    ``need``: what the rank at that hop computes with. ``kv``: what arrives there: the hull of all
    needs from that hop on. ``sums``: what the travelling dK/dV holds when it leaves that hop.
    """

    direction: int
    need: tuple[Ints, Ints]
    kv: tuple[Ints, Ints]
    sums: tuple[Ints, Ints]

    @cached_property
    def kv_rows(self) -> Ints:
        """Rows of K/V that arrive, ``[owner, hop]``; none at hop 0."""
        rows = np.maximum(self.kv[1] - self.kv[0], 0)
        rows[:, 0] = 0
        return rows

    @cached_property
    def sum_rows(self) -> Ints:
        """Rows of dK/dV that leave, ``[owner, hop]``: onwards, or home after the last need."""
        rows = np.maximum(self.sums[1] - self.sums[0], 0)
        return np.where(self.kv[1] > self.kv[0], rows, 0)


def traffic(pairs: geometry.Pairs, direction: int) -> Traffic:
    """All hulls of one direction, from what the ranks see of each other."""
    route = _route(len(pairs.first), direction)
    first, stop = pairs.first.ravel()[route], pairs.stop.ravel()[route]
    none = np.iinfo(np.int64).max
    first = np.where(stop > first, first, none)
    kv = (
        np.minimum.accumulate(first[:, ::-1], 1)[:, ::-1],
        np.maximum.accumulate(stop[:, ::-1], 1)[:, ::-1],
    )
    away_first, away_stop = first.copy(), stop.copy()
    away_first[:, 0], away_stop[:, 0] = none, 0  # the owner keeps its own part of dK/dV
    sums = (np.minimum.accumulate(away_first, 1), np.maximum.accumulate(away_stop, 1))
    return Traffic(direction, (first, stop), kv, sums)


class Sent(NamedTuple):
    """What all ranks send in one pass: rows of K/V, rows of dK/dV, and messages (a pair of tensors
    for the same rows is one)."""

    kv_rows: int
    sum_rows: int
    messages: int


def sent(moved: Traffic, which: Pass) -> Sent:
    """Count one pass of one direction."""
    kv = moved.kv_rows
    if which == "forward":
        return Sent(int(kv.sum()), 0, int(np.count_nonzero(kv)))
    sums = moved.sum_rows
    messages = int(np.count_nonzero(kv)) + int(np.count_nonzero(sums))
    return Sent(int(kv.sum()), int(sums.sum()), messages)


@lru_cache(maxsize=16)
def directions(
    partition: str, padded: int, world_size: int, mask: geometry.Mask
) -> tuple[geometry.Pairs, Traffic, Traffic]:
    """What ranks see of each other, and the traffic toward higher and toward lower ranks."""
    pairs = geometry.pairs(partition, padded, world_size, mask)
    return pairs, traffic(pairs, +1), traffic(pairs, -1)


def cheaper(
    up: Traffic, down: Traffic, which: Pass, kv_weight: int, sum_weight: int
) -> tuple[Traffic, Sent]:
    """The direction that sends fewer weighted rows; a tie goes toward higher ranks, so that every
    rank and the planner choose alike."""
    counted = [(moved, sent(moved, which)) for moved in (up, down)]
    return min(counted, key=lambda c: c[1].kv_rows * kv_weight + c[1].sum_rows * sum_weight)


def _rows(table: tuple[Ints, Ints], owner: int, hop: int) -> Rows:
    start, stop = int(table[0][owner, hop]), int(table[1][owner, hop])
    return Rows(start, stop) if stop > start else Rows(0, 0)


@lru_cache(maxsize=256)
def plan(
    partition: str,
    padded: int,
    world_size: int,
    mask: geometry.Mask,
    which: Pass,
    kv_weight: int = 1,
    sum_weight: int = 1,
) -> Walk:
    """The cheaper walk of a ring. ``kv_weight``, ``sum_weight``: bytes of one row of K/V, dK/dV."""
    _, up, down = directions(partition, padded, world_size, mask)
    moved, counted = cheaper(up, down, which, kv_weight, sum_weight)
    direction = moved.direction
    shard = padded // world_size
    alive = (moved.kv[1] > moved.kv[0]).any(0)
    length = max(1, int(np.flatnonzero(alive).max(initial=0)) + 1)
    backward = which == "backward"

    def at(rank: int, hop: int) -> Hop:
        owner = (rank - direction * hop) % world_size
        kv_here = _rows(moved.kv, owner, hop)
        kv_next = _rows(moved.kv, owner, hop + 1) if hop + 1 < length else Rows(0, 0)
        sum_in = sum_out = Rows(0, 0)
        if backward and hop > 0 and kv_here:
            sum_in = _rows(moved.sums, owner, hop - 1)
            sum_out = _rows(moved.sums, owner, hop)
        return Hop(
            owner=owner,
            held=kv_here if hop else Rows(0, shard),
            need=_rows(moved.need, owner, hop),
            forward=kv_next,
            sum_in=sum_in,
            sum_out=sum_out,
            sum_to=(rank + direction) % world_size if kv_next else owner,
        )

    def coming_home(owner: int) -> tuple[Rows, int, int] | None:
        hops = [hop for hop in range(1, length) if _rows(moved.kv, owner, hop)]
        if not backward or not hops:
            return None
        return (
            _rows(moved.sums, owner, hops[-1]),
            (owner + direction * hops[-1]) % world_size,
            hops[-1],
        )

    return Walk(
        direction=direction,
        hops=tuple(tuple(at(rank, hop) for hop in range(length)) for rank in range(world_size)),
        home=tuple(coming_home(owner) for owner in range(world_size)),
        sent=counted,
    )
