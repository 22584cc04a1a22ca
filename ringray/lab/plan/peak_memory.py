"""Peak memory of one rank, from the same tables that the ring executes.

To what a rank has at each step (``occupancy``) come the shard, the accumulators and what one
fused call allocates. Imports numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ringray.traffic.walk import FP32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ringray.traffic.occupancy import Walked
    from ringray.traffic.routes import Route
    from ringray.traffic.walk import Traffic, Walks

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


CALL_ELEMENTS = 1 << 19  # ringray_kernels.backends.aten.ELEMENTS_PER_CALL
_KEYS_PER_BLOCK = 512  # of ATen's CPU kernel
_PACKING = {256: 900, 64: 420, 32: 420}  # rows of fp32 that its bf16 backward needs, by query block


@dataclass(frozen=True)
class Sizes:
    """What one rank computes with: heads after any exchange of them, ``rows`` of its own.

    ``runs``: into how many blocks of neighbouring positions the rows fall; 1 also where they are
    evenly spaced. ``triangular``: a rank's own rows see its own keys up to themselves.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    itemsize: int
    threads: int
    fused_on_cpu: bool
    runs: int = 1
    triangular: bool = True

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

    @property
    def gradients(self) -> int:
        """Bytes of dQ, dK and dV in fp32."""
        return (self.query_row + 2 * self.key_row) * self.rows * FP32

    @property
    def delta(self) -> int:
        """Bytes that rowsum(dO * O) takes: the product in fp32, and both factors if narrower."""
        return self.query * FP32 * (3 if self.narrow else 1)

    def share(self, queries: Floats, keys: Floats, most: float = 1.0) -> Floats:
        """The part of all heads that one fused call takes, at most ``most`` of them."""
        if not self.fused_on_cpu:
            return np.full_like(queries, most)
        entries = self.batch * self.kv_heads
        largest = np.maximum(np.maximum(queries, keys), 1)
        per_entry = self.heads // self.kv_heads * largest * self.head_dim
        return np.minimum(most, np.maximum(1, CALL_ELEMENTS // per_entry) / entries)

    def scratch(self, queries: Floats, keys: Floats, buffers: int) -> Floats:
        """Bytes that ATen's CPU kernel allocates for its threads; ``buffers``: of scores."""
        if not self.fused_on_cpu:
            return np.zeros_like(queries)
        block = np.where(queries >= 768, 256, np.where(queries >= 192, 64, 32))
        scores = block * np.minimum(keys, _KEYS_PER_BLOCK)
        wide = FP32 + (self.itemsize if self.narrow else 0)
        needed = self.threads * scores * buffers * wide
        if buffers > 1 and self.narrow:
            rows = np.where(block == 256, _PACKING[256], _PACKING[64])
            needed = needed + self.threads * rows * self.head_dim * FP32
        return needed


def forward_call(
    sizes: Sizes, queries: Floats, keys: Floats, merges: bool | NDArray[np.bool_] = True
) -> Floats:
    """Bytes of forward calls' temporaries: the output, and then that in fp32 to be merged."""
    part = sizes.share(queries, keys) * sizes.query_row * queries
    merging = FP32 * part * merges if sizes.narrow else 0
    called = part * sizes.itemsize + np.maximum(merging, sizes.scratch(queries, keys, 1))
    return np.where((queries > 0) & (keys > 0), called, 0.0)


def backward_call(sizes: Sizes, queries: Floats, keys: Floats, most: float = 1.0) -> Floats:
    """Bytes of backward calls' temporaries: gradients, those of K and V for each query head; and
    meanwhile a copy of dO where heads share keys, or afterwards one of them in fp32 to be added."""
    share = sizes.share(queries, keys, most)
    part = share * sizes.query_row
    adding = (
        FP32 * np.maximum(part * queries, share * sizes.key_row * keys) if sizes.narrow else 0.0
    )
    copies = sizes.fused_on_cpu and sizes.heads > sizes.kv_heads
    copied = part * queries * sizes.itemsize if copies else 0.0
    called = part * (queries + 2 * keys) * sizes.itemsize + np.maximum(
        adding, copied + sizes.scratch(queries, keys, 2)
    )
    return np.where((queries > 0) & (keys > 0), called, 0.0)


class _Calls(NamedTuple):
    """Rows of the largest fused call of each visit, ``[rank, visit]``."""

    queries: Floats
    keys: Floats


def _calls(sizes: Sizes, moved: Traffic, *, queries_travel: bool) -> _Calls:
    """Where rows fall into blocks, two of them see each other wholly or not at all, so visible
    pairs over needed rows of one side are the rows of the other."""
    route = moved.route
    need = route.by_rank(np.maximum(moved.need[1] - moved.need[0], 0)).astype(np.float64)
    visible = route.by_rank(moved.visible)
    rows = float(sizes.rows)
    other = np.full_like(need, rows)
    if sizes.runs > 1:
        np.divide(visible, need, out=other, where=need > 0)
    other[:, 0] = rows  # all rows of a rank see its own keys, up to themselves or all of them
    other = np.ceil(np.minimum(other, rows))
    return _Calls(need, other) if queries_travel else _Calls(other, need)


def _largest(values: Floats, route: Route) -> Floats:
    """``[rank, visit]`` to ``[rank, step]``: visits of one step are computed one after another."""
    placed = np.zeros((len(values), max(route.step) + 2))
    if route.steps_differ:
        placed[:, route.step] = values
        return placed
    for visit, step in enumerate(route.step):
        np.maximum(placed[:, step], values[:, visit], out=placed[:, step])
    return placed


class Peaks(NamedTuple):
    """Bytes of the largest rank, in each pass."""

    forward: float
    backward: float


def walked_peaks(
    sizes: Sizes, walks: Walks, there: Walked, back: Walked | None, *, merges: bool, kept_rows: int
) -> Peaks:
    """Where chunks walk. ``there``, ``back``: both passes' tables. ``merges``: the output is put
    together in fp32. ``kept_rows``: of K/V, kept from the forward pass for the backward one."""
    itemsize, narrow = sizes.itemsize, sizes.narrow
    key_bytes = 2 * sizes.key_row * itemsize
    route = walks.forward.route
    calls = _calls(sizes, walks.forward, queries_travel=False)
    later = np.arange(len(route.step)) > 0  # the own chunk comes first and is not merged
    called = forward_call(sizes, *calls, merges=later)
    computing = _largest(called, route)
    held = there.chunks * key_bytes
    out = sizes.query * (FP32 if merges else itemsize)
    busy = (held + computing).max()
    if merges and narrow:
        computes = there.visible > 0
        last = computes.shape[1] - 1 - computes[:, ::-1].argmax(1)
        busy = max(busy, held[np.arange(len(held)), last].max() + sizes.query * itemsize)
    forward = sizes.inputs + out + sizes.lse + busy
    if back is None:
        return Peaks(float(forward), 0.0)
    weights = walks.backward_weights
    queries_travel = walks.travelling == "queries"
    calls = _calls(sizes, walks.backward, queries_travel=queries_travel)
    called = backward_call(sizes, *calls)
    if route.ranks > 1 and sizes.kv_heads > 1:  # the own chunk is computed in two halves
        called[:, 0] = backward_call(sizes, calls.queries[:, 0], calls.keys[:, 0], 0.5)
    if queries_travel and sizes.fused_on_cpu:
        # Away from its owner a row has no output: a stand-in is made, in fp32 like all operands.
        wide = replace(sizes, itemsize=FP32)
        needed = np.maximum(walks.backward.need[1] - walks.backward.need[0], 0)
        rows = walks.backward.route.by_rank(needed)
        stand_in = sizes.query_row * rows * FP32
        operands = (2 * sizes.query_row * rows + 2 * sizes.key_row * sizes.rows) * FP32
        away = backward_call(wide, *calls) + stand_in + (operands if narrow else 0)
        called[:, 1:] = np.where(rows > 0, away, 0.0)[:, 1:]
    moving = back.chunks * weights.chunk + back.sums * weights.sums
    computing = _largest(called, walks.backward.route)
    kept = sizes.inputs + 2 * sizes.query * itemsize + sizes.lse + kept_rows * key_bytes
    results = sizes.inputs if narrow else 0
    during = (moving + computing).max() + sizes.lse  # delta is as large as lse
    return Peaks(
        float(forward),
        float(kept + max(sizes.delta, sizes.gradients + max(during, results))),
    )


def gathered_peaks(sizes: Sizes, moved: Traffic, heads_at_once: int, *, backward: bool) -> Peaks:
    """Where a few K/V heads are gathered from all ranks at once."""
    rows, narrow, itemsize = sizes.rows, sizes.narrow, sizes.itemsize
    given = moved.chunk_rows
    received = moved.route.by_rank(given).sum(1)
    packed = np.where(given < rows, given, 0).sum(1)
    count = min(heads_at_once, sizes.kv_heads)
    group = replace(sizes, kv_heads=count, heads=sizes.heads * count // sizes.kv_heads)
    row = 2 * group.key_row  # elements of a gathered position
    next_too = sizes.kv_heads > count
    joined = (received + rows) * row * itemsize
    coming = (received + packed) * row * itemsize
    queries = np.full(len(received), np.ceil(rows / sizes.runs if sizes.triangular else rows))
    keys = (received + rows).astype(np.float64)
    ended = np.full_like(queries, group.query * itemsize if narrow else 0)
    # All keys before a block of rows in one call, and then the block itself, to be merged.
    calls = np.maximum(
        forward_call(group, queries, keys, merges=False), forward_call(group, queries, queries)
    )
    state = group.query * FP32 + np.maximum(calls, ended)
    computing = joined + coming * next_too + state
    base = sizes.inputs + sizes.query * itemsize + sizes.lse
    forward = base + max((coming + joined).max(), computing.max())
    if not backward:
        return Peaks(float(forward), 0.0)
    sums = (received + rows) * row * FP32
    shares = (received + given.sum(1) + rows) * row * FP32
    computing = joined + coming * next_too + sums + backward_call(group, queries, keys)
    busy = np.maximum(computing + shares * next_too, sums + shares + coming * next_too)
    kept = sizes.inputs + 2 * sizes.query * itemsize + sizes.lse
    results = sizes.inputs if narrow else 0
    during = max(busy.max() + sizes.lse, results)
    return Peaks(float(forward), float(kept + max(sizes.delta, sizes.gradients + during)))


def folded_peaks(sizes: Sizes, inside: Peaks, fold: int, *, backward: bool) -> Peaks:
    """With an exchange of heads around it. ``sizes``, ``inside``: of what is computed with the
    joined rows, whose tensors are as large as this rank's own before."""
    itemsize, inputs = sizes.itemsize, sizes.inputs
    away = (fold - 1) / fold
    packed = away if sizes.batch > 1 else 0.0  # one batch entry's heads lie together
    out = sizes.query * itemsize
    results = out + sizes.lse
    forward = max(
        inputs * (1 + away + packed) + out,
        inputs + inside.forward,
        2 * inputs + results + max(results * (1 + away), results + out),
    )
    if not backward:
        return Peaks(forward, 0.0)
    # The caller's out and dO are other tensors than those that are computed with.
    kept = inputs + 2 * out
    narrowing = sizes.gradients + inputs if sizes.narrow else 0
    leaving = max(narrowing, inputs * (2 + away))
    return Peaks(
        forward, max(kept + inside.backward, kept + inputs + 2 * out + sizes.lse + leaving)
    )
