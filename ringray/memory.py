"""Peak memory of one rank, from the same tables that the ring executes.

What is live at each step of a walk is a sum over its visits: a chunk from the step at which its
transfer begins until it has been computed with, a packed copy until it has been sent, a sum of
gradients from when it is made until it has left. To that come the shard, the accumulators and what
one fused call allocates. Imports numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ringray.route import KEPT, Route
from ringray.walk import FP32, Traffic, Weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


class Live(NamedTuple):
    """Which visits' tensors are live at which step, ``[visit, step]``, 0 or 1.

    ``at``: the step at which a visit is computed. ``chunk``: received and not yet done with.
    ``packed``: a copy that is being sent. ``made``: a sum of gradients, until it has left.
    ``joined``: one that has come to be added to the rank's own sum, or ``home``.
    """

    at: Floats
    chunk: Floats
    packed: Floats
    made: Floats
    joined: Floats
    home: Floats


@lru_cache(maxsize=256)
def live(route: Route) -> Live:
    """The tables of one route."""
    step, posted = np.array(route.step)[:, None], np.array(route.posted)[:, None]
    t = np.arange(max(route.step) + 2)[None, :]
    tables = (
        t == step,
        (posted <= t) & (t <= step),
        (posted <= t) & (t < step),
        (step <= t) & (t <= step + 1),
        t == step,
        t == step + 1,
    )
    return Live(*(table.astype(np.float64) for table in tables))


@lru_cache(maxsize=256)
def sources(route: Route) -> Ints:
    """By visit, the visit that hands the chunk to it; 0 for the owner's own and for kept chunks."""
    source = np.maximum(np.arange(len(route.step)) - 1, 0)
    for lane in route.lanes:
        source[lane.first] = max(lane.source, 0)
    return source


class Walked(NamedTuple):
    """Rows beside a rank's own at each step of a pass, ``[rank, step]``: of chunks, and of sums;
    and the visible pairs that it computes there, and the rows that arrive by its end."""

    chunks: Floats
    sums: Floats
    visible: Floats
    chunks_in: Floats
    sums_in: Floats


def walked(moved: Traffic, shard: int, *, backward: bool) -> Walked:
    """All steps of one pass, the sums' way home included."""
    route = moved.route
    tables, owner, visits = live(route), route.owner, np.arange(len(route.step))
    source = sources(route)
    arrive = moved.chunk_rows
    received = arrive[owner, visits].astype(np.float64)
    # As the source of a visit, a rank sends what the visit holds, and packs it if it holds more.
    sent = arrive[owner[:, source], visits]
    holds = np.maximum(moved.held[1] - moved.held[0], 0)
    holds[:, 0] = shard
    packed = np.where(sent < holds[owner[:, source], source], sent, 0).astype(np.float64)
    chunks = received @ tables.chunk + packed @ tables.packed
    for lane in route.lanes:
        if lane.source == KEPT:
            chunks += holds[owner[:, lane.first], lane.first][:, None] * tables.chunk[lane.first]
    visible = moved.visible[owner, visits].astype(np.float64) @ tables.at
    due = np.zeros_like(tables.at)
    due[:, :-1] = tables.at[:, 1:]
    chunks_in = received @ due
    if not backward:
        return Walked(chunks, np.zeros_like(chunks), visible, chunks_in, np.zeros_like(chunks))
    leave = moved.sum_rows
    made = leave[owner, visits].astype(np.float64)
    alive = moved.later[1] > moved.later[0]
    after = np.zeros_like(leave)  # what the sum of the visit before brings to a visit
    ends = alive.copy()
    for lane in route.lanes:
        inside = slice(lane.first + 1, lane.stop)
        before = slice(lane.first, lane.stop - 1)
        after[:, inside] = np.where(alive[:, inside], leave[:, before], 0)
        ends[:, before] &= ~alive[:, inside]
    joined = after[owner, visits].astype(np.float64)
    home = np.where(ends, leave, 0)  # by owner, which is the rank that receives it
    home[:, 0] = 0
    coming = joined @ tables.joined + home.astype(np.float64) @ tables.home
    return Walked(chunks, made @ tables.made + coming, visible, chunks_in, coming)


CALL_ELEMENTS = 1 << 19  # ringray_kernels.backends.aten.ELEMENTS_PER_CALL
_KEYS_PER_BLOCK = 512  # of ATen's CPU kernel; its query blocks depend on the rows of a call


@dataclass(frozen=True)
class Sizes:
    """What one rank computes with: heads after any exchange of them, ``rows`` of its own."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    itemsize: int
    threads: int
    fused_on_cpu: bool

    @property
    def narrow(self) -> bool:
        """Results are other tensors than their fp32 accumulators."""
        return self.itemsize != FP32

    @property
    def query_row(self) -> int:
        """Elements of one position of Q."""
        return self.batch * self.heads * self.head_dim

    @property
    def key_row(self) -> int:
        """Elements of one position of K."""
        return self.batch * self.kv_heads * self.head_dim

    @property
    def query(self) -> int:
        """Elements of Q."""
        return self.query_row * self.rows

    @property
    def lse(self) -> int:
        """Bytes of lse."""
        return self.batch * self.heads * self.rows * FP32

    @property
    def inputs(self) -> int:
        """Bytes of Q, K and V."""
        return (self.query_row + 2 * self.key_row) * self.rows * self.itemsize

    def share(self, queries: int, keys: int) -> float:
        """The part of all heads that one fused call takes; ``queries``, ``keys`` in rows."""
        if not self.fused_on_cpu:
            return 1.0
        entries = self.batch * self.kv_heads
        per_entry = self.heads // self.kv_heads * max(queries, keys, 1) * self.head_dim
        return min(1.0, max(1, CALL_ELEMENTS // per_entry) / entries)

    def scratch(self, queries: int, keys: int, buffers: int) -> int:
        """Bytes that ATen's CPU kernel allocates for its threads; ``buffers``: of scores."""
        if not self.fused_on_cpu:
            return 0
        block = 256 if queries >= 768 else 64 if queries >= 192 else 32
        scores = block * min(keys, _KEYS_PER_BLOCK)
        return self.threads * scores * buffers * (FP32 + (self.itemsize if self.narrow else 0))


def forward_call(sizes: Sizes, queries: int, keys: int) -> float:
    """Bytes of one forward call's temporaries: its output, and then that in fp32 to be merged."""
    part = sizes.share(queries, keys) * sizes.query_row * queries
    merging = FP32 * part if sizes.narrow else 0
    return part * sizes.itemsize + max(merging, sizes.scratch(queries, keys, 1))


def backward_call(sizes: Sizes, queries: int, keys: int) -> float:
    """Bytes of one backward call's temporaries: its gradients, K's and V's for each query head."""
    part = sizes.share(queries, keys) * sizes.query_row
    adding = FP32 * part * max(queries, keys) if sizes.narrow else 0
    return part * (queries + 2 * keys) * sizes.itemsize + max(
        adding, part * queries * sizes.itemsize + sizes.scratch(queries, keys, 2)
    )


def walked_peak(
    sizes: Sizes,
    forward: Traffic,
    backward: Traffic | None,
    weights: Weights,
    *,
    queries_travel: bool,
    merges: bool,
    kept_rows: int,
) -> float:
    """Bytes of the largest rank. ``weights``: of a row in the backward pass. ``merges``: the output
    is put together in fp32. ``kept_rows``: of K/V, kept from the forward pass for the backward one.
    """
    rows, narrow, itemsize = sizes.rows, sizes.narrow, sizes.itemsize
    key_bytes = 2 * sizes.key_row * itemsize
    there = walked(forward, rows, backward=False)
    call = forward_call(sizes, rows, rows)
    if merges:
        last = np.flatnonzero(there.visible.any(0)).max(initial=0)
        ending = there.chunks[:, last].max() * key_bytes + (sizes.query * itemsize if narrow else 0)
        out = sizes.query * FP32
    else:
        ending, out = 0.0, sizes.query * itemsize
    peak = sizes.inputs + out + sizes.lse + max(there.chunks.max() * key_bytes + call, ending)
    if backward is None:
        return float(peak)
    back = walked(backward, rows, backward=True)
    kept = sizes.inputs + 2 * sizes.query * itemsize + sizes.lse + kept_rows * key_bytes
    delta = sizes.query * FP32 * (2 if narrow else 1)
    gradients = (sizes.query_row + 2 * sizes.key_row) * rows * FP32
    moving = back.chunks * weights.chunk + back.sums * weights.sums
    computing = np.where(back.visible > 0, backward_call(sizes, rows, rows), 0.0)
    if queries_travel and sizes.fused_on_cpu:
        # Away from its owner a row has no output: a stand-in is made, in fp32 like all operands.
        wide = replace(sizes, itemsize=FP32)
        operands = (2 * sizes.query_row + 2 * sizes.key_row) * rows * FP32 if narrow else 0
        away = backward_call(wide, rows, rows) + operands + sizes.query * FP32
        computing[:, 1:] = np.where(back.visible[:, 1:] > 0, away, 0.0)
    results = sizes.inputs if narrow else 0
    during = (moving + computing).max() + sizes.lse
    return float(max(peak, kept + delta, kept + gradients + max(during, results)))


def gathered_peak(sizes: Sizes, moved: Traffic, heads_at_once: int, *, backward: bool) -> float:
    """As ``walked_peak``, where a few K/V heads are gathered from all ranks at once."""
    rows, narrow, itemsize = sizes.rows, sizes.narrow, sizes.itemsize
    route, visits = moved.route, np.arange(len(moved.route.step))
    received = moved.chunk_rows[route.owner, visits].sum(1)
    given = moved.chunk_rows
    packed = np.where(given < rows, given, 0).sum(1)
    keys = int(received.max()) + rows
    share = min(heads_at_once, sizes.kv_heads) / sizes.kv_heads
    more = sizes.kv_heads > heads_at_once
    group = replace(
        sizes,
        kv_heads=min(heads_at_once, sizes.kv_heads),
        heads=sizes.heads * min(heads_at_once, sizes.kv_heads) // sizes.kv_heads,
    )
    row = 2 * sizes.key_row * share  # elements of a gathered position
    coming = float((received + packed).max()) * row * itemsize
    joined = keys * row * itemsize
    part = group.query * (FP32 + (itemsize if narrow else 0))
    computing = joined + max(coming if more else 0, 0) + part + forward_call(group, rows, keys)
    base = sizes.inputs + sizes.query * itemsize + sizes.lse
    peak = base + max(coming + joined, computing)
    if not backward:
        return float(peak)
    kept = sizes.inputs + 2 * sizes.query * itemsize + sizes.lse
    delta = sizes.query * FP32 * (2 if narrow else 1)
    gradients = (sizes.query_row + 2 * sizes.key_row) * rows * FP32 + sizes.lse
    sums = keys * row * FP32
    shares = float((received + given.sum(1)).max() + rows) * row * FP32
    computing = joined + (coming if more else 0) + sums + backward_call(group, rows, keys)
    busy = max(computing + (shares if more else 0), sums + shares + (coming if more else 0))
    results = sizes.inputs if narrow else 0
    return float(max(peak, kept + delta, kept + gradients + max(busy, results)))


def folded_peak(sizes: Sizes, inside: float, fold: int, *, backward: bool) -> float:
    """The peak with the exchange of heads around it. ``sizes``, ``inside``: of what is computed
    with the joined rows, whose tensors are as large as this rank's own before."""
    itemsize = sizes.itemsize
    away = (fold - 1) / fold
    packed = away if sizes.batch > 1 else 0.0  # one batch entry's heads lie together
    largest = max(sizes.query_row, sizes.key_row) * sizes.rows * itemsize
    entering = sizes.inputs * (1 + away + packed) + largest
    results = sizes.query * itemsize + sizes.lse
    leaving = 2 * sizes.inputs + results * (2 + away) + results
    peak = max(entering, sizes.inputs + inside, leaving)
    if backward:
        kept = 2 * sizes.inputs + 2 * sizes.query * itemsize + 2 * results
        peak = max(peak, sizes.inputs + inside + sizes.query * itemsize)
        peak = max(peak, kept + sizes.inputs * (2 + away) + sizes.inputs)
    return peak
