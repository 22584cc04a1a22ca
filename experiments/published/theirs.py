"""Rings of other systems, as they compute: what they copy, merge and send, step by step.

An implementation is data beside the figures that it made (``implementation`` in the YAML files):
bytes of memory that its own operations move, counted in its source. A step is one call of attention
at the rate of the hardware's curves, with these bytes beside it. All chunks go all the way around,
and messages take the ports that ``ringray`` simulates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.lab.predict import rates
from ringray.lab.predict.hardware import Direction, Fleet, Hardware
from ringray.lab.predict.rates import Rates
from ringray.lab.predict.simulator import Ports

Floats = NDArray[np.float64]
Bytes = Mapping[str, float]

STREAMED = 0.85  # of the bandwidth of memory, that elementwise operations reach
PAIR_FLOPS: dict[Direction, int] = {"forward": 4, "backward": 10}  # times heads and head dim
ITEMSIZE = 2  # all ran in bf16


class Pass(NamedTuple):
    """Bytes that one pass moves beside attention, for each element of ``q`` and of ``kv``.

    ``begin``, ``end``: once, of the own rows. ``first``, ``step``: of what the first step and the
    others compute with; ``only``: of the first of one. ``half``, ``shifted``: more where that is a
    half, or all rows but one. ``exchange``: of what an exchange of heads for rows sends, among
    several devices, and ``alone``, with itself. ``scattered``: elements written one at a time.
    """

    q: Bytes
    kv: Bytes
    scattered: Bytes = MappingProxyType({})


class Implementation(NamedTuple):
    """Another system. ``gathered``: its passes that gather all keys first, whose ``kv`` counts for
    elements of all keys, and ``seen`` for those that a call sees. ``gradients``: bytes of an
    element of dK and dV on the way. ``scatter``: elements written in a second, one at a time."""

    passes: Mapping[str, Pass]
    gathered: Mapping[str, Pass]
    gradients: int = ITEMSIZE
    scatter: float = math.inf

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Implementation:
        """Returns the implementation of a file."""
        passes, gathered = (
            {name: Pass(**of[name]) for name in ("forward", "backward") if name in of}
            for of in (fields, fields.get("gathered", {}))
        )
        others = {name: fields[name] for name in ("gradients", "scatter") if name in fields}
        return cls(passes, gathered, **others)


class Ring(NamedTuple):
    """A ring of ``ranks``, each of ``fold`` devices that share the heads of its rows."""

    ranks: int
    fold: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    partition: str
    causal: bool

    @property
    def q(self) -> int:
        """Returns the elements of a row of Q, all sequences of the batch."""
        return self.batch * self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Returns the elements of a row of K and V."""
        return 2 * self.batch * self.kv_heads * self.head_dim


def ring_of(fields: Mapping[str, Any]) -> Ring:
    """Returns the ring of a row of a table."""
    devices, (way, _, number) = fields["ring_size"], fields["transport"].partition(":")
    fold = {"ulysses": devices, "hybrid": int(number or 1)}.get(way, 1)
    ranks = devices // fold
    return Ring(
        ranks, fold, fields["seq_len"] // ranks, fields["heads"] // fold,
        fields["kv_heads"] // fold, fields["head_dim"], fields["batch"],
        fields.get("partition", "contiguous"), fields["causal"],
    )  # fmt: skip


def seconds(
    fields: Mapping[str, Any], direction: Direction, on: Hardware, how: Implementation
) -> float:
    """Returns the seconds of one pass of a row of a table."""
    ring = ring_of(fields)
    if fields["transport"].startswith("allgather"):
        return _gathered(ring, direction, on, how)
    if fields["transport"] == "by head":
        return _by_head(ring, direction, on)
    moved = how.passes[direction]
    if fields["ring_size"] == 1:  # attention alone
        moved = Pass({}, {})
    numbers = range(ring.ranks)
    computing = np.stack([_step(ring, number, direction, on, how, moved) for number in numbers])
    own = ring.q * ring.rows, ring.kv * ring.rows
    whens = ["exchange" if ring.fold > 1 else "alone"]
    if ring.ranks > 1 or "only" not in moved.q:
        whens += ["begin", "end"]
    around = sum(
        elements * of.get(when, 0.0)
        for elements, of in zip(own, (moved.q, moved.kv), strict=True)
        for when in whens
    )
    time = _around(ring, computing, direction, on, how) + _exchange(ring, on)
    return time + around / (STREAMED * on.memory_bandwidth)


def _curve(ring: Ring, direction: Direction, on: Hardware) -> Rates:
    heads, kv_heads = (ring.batch * number for number in (ring.heads, ring.kv_heads))
    return rates.find(on, "bfloat16", ring.head_dim, direction, heads=heads, kv_heads=kv_heads)


def _step(
    ring: Ring, number: int, direction: Direction, on: Hardware, how: Implementation, moved: Pass
) -> Floats:
    """Returns seconds by rank of the step in which rank r has the keys of rank r - ``number``."""
    rank = np.arange(ring.ranks)
    earlier = number <= rank  # keys of a rank that comes before, or the own ones
    queries = keys = np.full(ring.ranks, float(ring.rows))
    triangle = np.full(ring.ranks, ring.causal and (number == 0 or ring.partition == "striped"))
    shifted = np.full(ring.ranks, False)
    if ring.causal and number > 0 and ring.partition == "zigzag":
        queries, keys = np.where(earlier, queries, queries / 2), np.where(earlier, keys / 2, keys)
    if ring.causal and number > 0 and ring.partition == "striped":
        shifted = ~earlier
        queries = keys = queries - shifted
    skipped = ring.causal and ring.partition == "contiguous"
    seen = earlier if skipped else np.full(ring.ranks, True)
    pairs = queries * np.where(triangle, (keys + 1) / 2, keys)
    curve = _curve(ring, direction, on)
    flops = PAIR_FLOPS[direction] * ring.q * pairs
    bytes_moved, scattered = np.zeros(ring.ranks), np.zeros(ring.ranks)
    for name, rows, row in (("q", queries, ring.q), ("kv", keys, ring.kv)):
        of: Bytes = getattr(moved, name)
        names = ["step"] if number else ["only"] * (ring.ranks == 1) + ["first", "step"]
        each = next((of[when] for when in names if when in of), 0.0)
        further = np.where(rows < ring.rows - 1, of.get("half", 0.0), 0.0)
        further = further + shifted * of.get("shifted", 0.0)
        bytes_moved = bytes_moved + row * rows * (each + further)
        scattered = scattered + row * rows * moved.scattered.get(name, 0.0)
    beside = bytes_moved / (STREAMED * on.memory_bandwidth) + scattered / how.scatter
    return seen * (curve.seconds(flops, queries, keys, pairs) + on.call + beside)


def _around(
    ring: Ring, computing: Floats, direction: Direction, on: Hardware, how: Implementation
) -> float:
    """Returns the seconds of all steps, ``[step, rank]``. Keys and values are sent while a step
    computes; sums of gradients follow a step later, the last of them go home after it."""
    now, rank, backward = np.zeros(ring.ranks), np.arange(ring.ranks), direction == "backward"
    nodes = -(-ring.ranks * ring.fold // on.ranks_per_node)
    fleet = Fleet("theirs", on, nodes, ring.ranks * ring.fold // nodes, ring.fold)
    ports, to, steps = Ports(fleet, ring.ranks), (rank + 1) % ring.ranks, len(computing)
    chunk = ring.rows * ring.kv
    for number, busy in enumerate(computing):
        ended = now + busy
        sent = chunk * ITEMSIZE * (number < steps - 1)
        sent += chunk * how.gradients * (backward and number > 0)
        if ring.ranks > 1 and sent:
            ready = np.maximum(now, now[to])
            arrived = ports.send(rank, to, np.full(ring.ranks, float(sent)), ready)
            np.maximum.at(ended, to, arrived)
            ended = np.maximum(ended, arrived)
        now = ended
    if backward and ring.ranks > 1:
        now = ports.send(rank, to, np.full(ring.ranks, float(chunk * how.gradients)), now)
    return float(now.max())


def _exchange(ring: Ring, on: Hardware) -> float:
    """Returns the seconds in which messages exchange heads for rows before a pass and after it: Q,
    K, V and the output, or gradients of the same."""
    sent = ITEMSIZE * ring.rows * (2 * ring.q + ring.kv)
    near = (min(ring.fold, on.ranks_per_node) - 1) / ring.fold
    far = 1 - 1 / ring.fold - near
    return max(sent * near / on.inner.bandwidth, sent * far / on.outer.bandwidth)


def _gathered(ring: Ring, direction: Direction, on: Hardware, how: Implementation) -> float:
    """Returns the seconds of a pass of zigzag rows in two calls, one for each block of rows, whose
    keys were gathered before; gradients of keys are reduced after it."""
    blocks, rank = 2 * ring.ranks, np.arange(ring.ranks)
    block, every = np.full(ring.ranks, ring.rows / 2), ring.rows * ring.ranks
    curve = _curve(ring, direction, on)
    moved, time, seen = how.gathered[direction], np.zeros(ring.ranks), np.zeros(ring.ranks)
    for number in (rank, blocks - 1 - rank):
        keys: Floats = block * (number + 1.0) if ring.causal else np.full(ring.ranks, float(every))
        pairs: Floats = block * (keys - block / 2 * ring.causal)
        flops: Floats = PAIR_FLOPS[direction] * ring.q * pairs
        time, seen = time + on.call + curve.seconds(flops, block, keys, pairs), seen + keys
    scattered = [moved.scattered.get(name, 0.0) for name in ("q", "kv")]
    q, kv = ring.q * ring.rows, ring.kv * seen
    streamed = q * moved.q["all"] + ring.kv * every * moved.kv["all"] + kv * moved.kv.get("seen", 0)
    time = time + streamed / (STREAMED * on.memory_bandwidth)
    time = time + (q * scattered[0] + kv * scattered[1]) / how.scatter
    sent = ITEMSIZE * ring.kv * (every - ring.rows) * (1 + (direction == "backward"))
    return float(time.max() + sent / on.inner.bandwidth)


def _by_head(ring: Ring, direction: Direction, on: Hardware) -> float:
    """Returns the seconds of a pass of the last rank of contiguous rows, whose keys are gathered
    for each head of keys while the one before computes; gradients of each are reduced after it."""
    alone = ring._replace(heads=ring.heads // ring.kv_heads, kv_heads=1)
    keys, queries = (np.full(1, float(ring.rows * times)) for times in (ring.ranks, 1))
    pairs: Floats = queries * (keys - queries / 2)
    flops: Floats = PAIR_FLOPS[direction] * alone.q * pairs
    (busy,) = _curve(alone, direction, on).seconds(flops, queries, keys, pairs)
    moving = ITEMSIZE * alone.kv * ring.rows * (ring.ranks - 1) / on.inner.bandwidth
    reduced = moving * (direction == "backward")
    times = ring.kv_heads * (on.call + reduced + max(float(busy), moving))
    joined = 4 * ring.q * ring.rows * (direction == "forward")  # outputs of all heads
    return times + moving + joined / (STREAMED * on.memory_bandwidth)
