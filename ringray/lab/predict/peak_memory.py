"""Peak memory of one rank, from the same tables that the ring executes.

Adds the shard, the accumulators and the temporaries of one fused call to the rows that a rank has
at each step (``occupancy``). Imports numpy only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ringray.traffic.hulls import Traffic
from ringray.traffic.occupancy import walked
from ringray.traffic.routes import KEPT, Route
from ringray.traffic.walk import FP32, Walks
from ringray.transport import Exchange

Floats = NDArray[np.float64]

CALL_ELEMENTS = 1 << 19  # ringray_kernels.backends.aten.ELEMENTS_PER_CALL
MASKED_ROWS = 256  # ringray_kernels.cover.DEFAULT_BLOCK
_KEYS_PER_BLOCK = 512  # of ATen's CPU kernel
_RANKS_AT_ONCE = 256
_PACKING = {256: 900, 64: 420, 32: 420}  # rows of fp32 that its bf16 backward needs, by query block
_TILE = 64  # rows of queries and of keys from which it copies K and V for products by tiles


@dataclass(frozen=True)
class Sizes:
    """Sizes of one rank's computation: heads after any exchange of them, ``rows`` of its own.

    ``head_dim``: the mean of that of K and that of V. ``runs``: number of blocks of neighbouring
    positions that the rows form, at most, 1 also if they are evenly spaced. ``longest``: rows of
    the longest block. ``spaced``: number of sequences
    of evenly spaced positions that they form, 0 if those are neighbours. ``triangular``: a rank's
    own rows see its own keys up to themselves. ``plain``: causal, or no mask at all. ``quantized``:
    Q, K and V are computed with in 8 bits. ``tiles``: cores multiply bf16 by tiles.
    ``packs``: operands of a backward call are packed for it.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    itemsize: int
    threads: int
    fused_on_cpu: bool
    runs: int
    longest: int
    triangular: bool
    plain: bool
    quantized: bool = False
    spaced: int = 0
    tiles: bool = False
    packs: bool = True

    @property
    def narrow(self) -> bool:
        """True if results are other tensors than their fp32 accumulators."""
        return self.itemsize != FP32

    @property
    def stepped(self) -> bool:
        """True if a rank's rows see another's keys in steps."""
        return self.triangular and self.spaced > 1

    @property
    def query_row(self) -> int:
        """Elements of one position of Q."""
        return self.batch * self.heads * self.head_dim

    @property
    def key_row(self) -> int:
        """Elements of one position of K."""
        return self.batch * self.kv_heads * self.head_dim

    @property
    def out(self) -> int:
        """Bytes of Q, out or dO."""
        return self.query_row * self.rows * self.itemsize

    @property
    def lse(self) -> int:
        """Bytes of lse, and of delta."""
        return self.batch * self.heads * self.rows * FP32

    @property
    def inputs(self) -> int:
        """Bytes of Q, K and V."""
        return (self.query_row + 2 * self.key_row) * self.rows * self.itemsize

    @property
    def in_bytes(self) -> int:
        """Bytes of Q, K and V in e4m3 with their scales, and widened to bf16 for a call."""
        elements = self.query_row + 2 * self.key_row
        scales = self.batch * (self.heads + 2 * self.kv_heads) * FP32
        return self.quantized * self.rows * (3 * elements + scales)

    @property
    def gradients(self) -> int:
        """Bytes of dQ, dK and dV in fp32."""
        return (self.query_row + 2 * self.key_row) * self.rows * FP32

    def backward(self, during: float) -> float:
        """Returns bytes of a backward pass that needs ``during`` beside inputs, out, dO, lse, delta
        and fp32 gradients; or these in the dtype of the inputs beside them, if that is narrower; or
        delta's product in fp32 and both its factors if they are narrower."""
        product = self.query_row * self.rows * FP32 * (3 if self.narrow else 1)
        beside = max(self.lse + during, self.inputs * self.narrow)
        most = max(product, self.gradients + beside)
        return self.inputs + 2 * self.out + self.lse + most

    def share(self, queries: Floats, keys: Floats, most: Floats | float = 1.0) -> Floats:
        """Returns the share of all heads that one fused call takes, at most ``most``."""
        if not self.fused_on_cpu:
            return np.zeros_like(queries) + most
        entries = self.batch * self.kv_heads
        largest = np.maximum(np.maximum(queries, keys), 1)
        per_entry = self.heads // self.kv_heads * largest * self.head_dim
        return np.minimum(most, np.maximum(1, CALL_ELEMENTS // per_entry) / entries)

    def scratch(self, queries: Floats, keys: Floats, buffers: int) -> Floats:
        """Returns the bytes ATen's CPU kernel takes for its threads: ``buffers`` of scores each."""
        if not self.fused_on_cpu:
            return np.zeros_like(queries)
        block = np.where(queries >= 768, 256, np.where(queries >= 192, 64, 32))
        scores = block * np.minimum(keys, _KEYS_PER_BLOCK)
        wide = FP32 + (self.itemsize if self.narrow else 0)
        needed = self.threads * scores * buffers * wide
        if buffers > 1 and self.narrow and self.packs:
            rows = np.where(block == 256, _PACKING[256], _PACKING[64])
            needed = needed + self.threads * rows * self.head_dim * FP32
        if buffers == 1 and self.tiles and self.narrow:
            copies = 2 * self.share(queries, keys) * self.query_row * keys
            block = self.threads * np.minimum(keys, _KEYS_PER_BLOCK) * self.head_dim
            tiled = (queries >= _TILE) & (keys >= _TILE)
            needed = needed + np.where(tiled, (copies + block) * self.itemsize, 0)
        return needed


def peak(sizes: Sizes, exchange: Exchange, walks: Walks, *, backward: bool) -> int:
    """Returns bytes of the largest rank's tensors, inputs included, with or without a backward
    pass."""
    if exchange.heads_at_once is not None:
        peaks = _gathered(sizes, walks.forward, exchange.heads_at_once)
    else:
        back = _walked_backward(sizes, walks) if backward else 0.0
        peaks = _walked_forward(sizes, walks), back
    if exchange.fold > 1:
        peaks = _folded(sizes, *peaks, exchange.fold)
    return int(max(peaks[: 1 + backward])) + sizes.in_bytes


def _forward_call(
    sizes: Sizes, queries: Floats, keys: Floats, merges: bool | NDArray[np.bool_] = True
) -> Floats:
    """Returns bytes of a forward call's temporaries: the output, and that in fp32 if merged."""
    part = sizes.share(queries, keys) * sizes.query_row * queries
    merging = FP32 * part * merges if sizes.narrow else 0
    called = part * sizes.itemsize + np.maximum(merging, sizes.scratch(queries, keys, 1))
    return np.where((queries > 0) & (keys > 0), called, 0.0)


def _backward_call(
    sizes: Sizes, queries: Floats, keys: Floats, most: Floats | float = 1.0
) -> Floats:
    """Returns bytes of a backward call's temporaries: gradients, those of K and V per query head; a
    copy of dO if heads share keys, or afterwards one gradient in fp32 that is added."""
    share = sizes.share(queries, keys, most)
    part = share * sizes.query_row
    adding: Floats | float = 0.0
    if sizes.narrow:
        adding = FP32 * np.maximum(part * queries, share * sizes.key_row * keys)
    # Heads that share keys, and several heads of some rows, do not lie together.
    apart = (queries < sizes.rows) & (share * sizes.batch * sizes.kv_heads > 1)
    copies = (apart | (sizes.heads > sizes.kv_heads)) & sizes.fused_on_cpu
    copied = part * queries * sizes.itemsize * copies
    called = part * (queries + 2 * keys) * sizes.itemsize + np.maximum(
        adding, copied + sizes.scratch(queries, keys, 2)
    )
    return np.where((queries > 0) & (keys > 0), called, 0.0)


def _in_blocks(
    bytes_of: Callable[[Floats, Floats], Floats], queries: Floats, keys: Floats
) -> Floats:
    """Returns the bytes of all calls, of some ranks at a time, which bounds the memory."""
    bytes_needed = np.empty_like(queries)
    for rank in range(0, len(bytes_needed), _RANKS_AT_ONCE):
        some = slice(rank, rank + _RANKS_AT_ONCE)
        bytes_needed[some] = bytes_of(queries[some], keys[some])
    return bytes_needed


def _in_steps(
    bytes_of: Callable[[Floats, Floats], Floats], itemsize: int, queries: Floats, keys: Floats
) -> Floats:
    """Returns the bytes of the calls that cover triangles with steps: half of the rows and keys
    without a mask, then a few rows with one (``ringray_kernels.cover``)."""
    halved = np.ceil(np.log2(np.maximum(queries / MASKED_ROWS, 1)))
    rows, seen = queries / 2**halved, keys / 2**halved
    seen = np.where((halved > 0) & (seen < MASKED_ROWS), 2 * seen, seen)
    masked = bytes_of(rows, seen) + rows * seen * itemsize
    whole = bytes_of(queries / 2, keys / 2)
    return np.where(keys / 2 >= MASKED_ROWS, np.maximum(masked, whole), masked)


def _needed(moved: Traffic) -> Floats:
    """Returns the rows that each visit computes with, ``[rank, visit]``."""
    rows = moved.rows(moved.need).sum(0)
    return moved.route.by_rank(rows).astype(np.float64)


def call_rows(sizes: Sizes, moved: Traffic, *, queries_travel: bool) -> tuple[Floats, Floats]:
    """Returns query and key rows of the largest fused call of each visit, ``[rank, visit]``.

    Two blocks of neighbouring positions see each other wholly or not at all, so visible pairs over
    the needed rows of one side are the rows of the other.
    """
    need = _needed(moved)
    visible = moved.route.by_rank(moved.visible)
    rows = float(sizes.rows)
    other = np.full_like(need, rows)
    if sizes.triangular and sizes.spaced:
        other = need.copy()  # but for one row, at most
    if sizes.runs > 1:
        np.divide(visible, need, out=other, where=need > 0)
    other[:, 0] = rows  # all rows of a rank see its own keys, up to themselves or all of them
    other = np.ceil(np.minimum(other, rows))
    return (need, other) if queries_travel else (other, need)


def _largest(values: Floats, route: Route) -> Floats:
    """Returns the largest of each step, ``[rank, step]``, whose visits come one after another."""
    placed = np.zeros((len(values), max(route.step) + 2))
    for visit, step in enumerate(route.step):
        np.maximum(placed[:, step], values[:, visit], out=placed[:, step])
    return placed


def _walked_forward(sizes: Sizes, walks: Walks) -> float:
    """Returns the peak of the forward pass of chunks that walk."""
    moved, table = walks.forward, walked(walks.forward, sizes.rows, backward=False)
    route = moved.route
    merged = later(moved)
    calls = call_rows(sizes, moved, queries_travel=False)
    called = _in_blocks(partial(_forward_call, sizes, merges=merged), *calls)
    if sizes.stepped:
        bytes_of = partial(_forward_call, sizes)
        called[:, 1:] = _in_steps(bytes_of, sizes.itemsize, *(x[:, 1:] for x in calls))
    computing = _largest(called, route)
    held = table.chunks * walks.weights.forward.chunk
    busy = float((held + computing).max())
    merges = route.ranks > 1 or not sizes.plain  # the output is put together in fp32
    if merges and sizes.narrow:
        computes = table.visible > 0
        last = computes.shape[1] - 1 - computes[:, ::-1].argmax(1)
        busy = max(busy, float(held[np.arange(len(held)), last].max()) + sizes.out)
    out = sizes.query_row * sizes.rows * FP32 if merges else sizes.out
    return sizes.inputs + out + sizes.lse + busy


def later(moved: Traffic) -> NDArray[np.bool_]:
    """Returns ``[visit]``: False for a rank's own chunk, which comes first and is not merged."""
    return np.arange(len(moved.route.step)) > 0


def _walked_backward(sizes: Sizes, walks: Walks) -> float:
    """Returns the peak of the backward pass of chunks that walk."""
    table = walked(walks.backward, sizes.rows, backward=True)
    queries_travel = walks.travelling == "queries"
    queries, keys = call_rows(sizes, walks.backward, queries_travel=queries_travel)
    called = _in_blocks(partial(_backward_call, sizes), queries, keys)
    halves = walks.forward.route.ranks > 1 and sizes.kv_heads > 1
    # Of the own chunk.
    called[:, 0] = _backward_call(sizes, queries[:, 0], keys[:, 0], 0.5 if halves else 1.0)
    if sizes.stepped:
        bytes_of = partial(_backward_call, sizes)
        called[:, 1:] = _in_steps(bytes_of, sizes.itemsize, queries[:, 1:], keys[:, 1:])
    if queries_travel and sizes.fused_on_cpu:
        # Away from its owner a row has no output: a stand-in is made, and fp32 copies of all
        # operands with a column more.
        rows = _needed(walks.backward)
        away = _backward_call(replace(sizes, itemsize=FP32), queries, keys)
        away += (3 * sizes.query_row * rows + 2 * sizes.key_row * sizes.rows) * FP32
        called[:, 1:] = np.where(rows > 0, away, 0.0)[:, 1:]
    del queries, keys  # large in large rings
    computing, weights = _largest(called, walks.backward.route), walks.backward_weights
    if halves:  # the second half is kept for the end
        computing[:, -1] = np.maximum(computing[:, -1], called[:, 0])
    computing += table.chunks * weights.chunk
    computing += table.sums * weights.sums
    busy = float(computing.max())
    kept_bytes = _kept_rows(walks) * 2 * sizes.key_row * sizes.itemsize
    return kept_bytes + sizes.backward(busy)


def _kept_rows(walks: Walks) -> int:
    """Returns the rows of K/V that a rank keeps between the passes: the last that it received."""
    if not any(lane.source == KEPT for lane in walks.backward.route.lanes):
        return 0
    last = [lane.stop - 1 for lane in walks.forward.route.lanes]
    rows = walks.forward.rows(walks.forward.held).sum(0)
    return int(walks.forward.route.by_rank(rows)[:, last].sum(1).max())


def _gathered(sizes: Sizes, moved: Traffic, heads_at_once: int) -> tuple[float, float]:
    """Returns the peaks of both passes where a few K/V heads of all ranks are gathered at once."""
    rows = sizes.rows
    handed = moved.chunk_rows.sum(0)
    received = moved.route.by_rank(handed).sum(1)
    count = min(heads_at_once, sizes.kv_heads)
    # Some rows of one head lie together, and are sent from where they are.
    packed = np.where(handed < rows, handed, 0).sum(1) * (sizes.batch * count > 1)
    group = replace(sizes, kv_heads=count, heads=sizes.heads * count // sizes.kv_heads)
    row = 2 * group.key_row  # elements of a gathered position
    next_too = sizes.kv_heads > count
    joined = (received + rows) * row * sizes.itemsize
    coming = (received + packed) * row * sizes.itemsize
    queries = np.full(received.shape, sizes.longest if sizes.triangular else rows)
    keys = (received + rows).astype(np.float64)
    # All keys before a block of rows in one call, and then the block itself, to be merged.
    before = np.maximum(keys - queries, queries) if sizes.triangular else keys
    calls = np.maximum(
        _forward_call(group, queries, before, merges=False), _forward_call(group, queries, queries)
    )
    backward = _backward_call(group, queries, before)
    if sizes.triangular and sizes.spaced and len(received) > 1:
        calls, backward = (
            _in_steps(partial(call, group), sizes.itemsize, queries, keys)
            for call in (_forward_call, _backward_call)
        )
    state = group.query_row * rows * FP32 + np.maximum(calls, group.out * group.narrow)
    busy = np.maximum(coming + joined, joined + coming * next_too + state)
    forward = sizes.inputs + sizes.out + sizes.lse + float(busy.max())
    sums = (received + rows) * row * FP32
    shares = (received + handed.sum(1) + rows) * row * FP32
    # Beside a group of two, the other comes or has left; of more, the next comes as one leaves.
    beside = coming + shares if sizes.kv_heads > 2 * count else np.maximum(coming, shares)
    busy = np.maximum(
        joined + sums + backward + beside * next_too, sums + shares + coming * next_too
    )
    return forward, sizes.backward(float(busy.max()))


def _folded(sizes: Sizes, forward: float, backward: float, fold: int) -> tuple[float, float]:
    """Returns the peaks of both passes with an exchange of heads for rows around the given ones,
    whose tensors are as large as this rank's own before."""
    inputs, out = sizes.inputs, sizes.out
    away = (fold - 1) / fold
    packed = away * (sizes.batch > 1)  # one batch entry's heads lie together
    results = out + sizes.lse
    computing = 2 * inputs + results + max(results * (1 + away), results + out)
    leaving = inputs * (1 + away + packed) + out
    forward = max(leaving, computing, inputs + forward)
    # The caller's out and dO are other tensors than those that are computed with.
    kept_bytes = inputs + 2 * out
    narrowing = sizes.gradients + inputs if sizes.narrow else 0
    leaving = max(narrowing, inputs * (2 + away))
    return forward, kept_bytes + max(backward, kept_bytes + sizes.lse + leaving)
