"""Time of one trial on a ring: its calls by the curves, its messages by the simulator.

Imports numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.instruments.hops import Span
from ringray.lab.predict import collectives, peak_memory, rates
from ringray.lab.predict.hardware import Fleet, Hardware
from ringray.lab.predict.peak_memory import Sizes
from ringray.lab.predict.simulator import Cores, Finished, PassWork, RingRanks, simulate, slowness
from ringray.traffic.hulls import Pass
from ringray.traffic.walk import FP32, Walks
from ringray.transport import Exchange

Floats = NDArray[np.float64]

_STREAMED = 0.85  # of the bandwidth of memory, that elementwise operations reach
_RANKS_AT_ONCE = 256  # bounds the memory of large rings


class RingWork(NamedTuple):
    """The work of a ring in one trial. ``sizes``: of one rank's computation. ``exchanged_bytes``:
    of all ranks in the exchanges of heads for rows around the passes."""

    passes: list[PassWork]
    sizes: Sizes
    exchange: Exchange
    walks: Walks
    exchanged_bytes: int


class RingTime(NamedTuple):
    """Predicted time of a trial, in seconds. ``exposed``: beyond the computation of the busiest
    rank. ``spread``: relative half width of the 80% interval. ``spans``: timelines by rank."""

    seconds: float
    exposed: float
    spread: float
    outer_bytes: float
    spans: dict[int, list[Span]]


def trial_time(ring_work: RingWork, on: Fleet, record: Sequence[int] = ()) -> RingTime:
    """Returns the time of all passes, one after the other."""
    passes, sizes, exchange, walks, exchanged_bytes = ring_work
    # Ranks that exchange heads do the same at the same time, so the first stands for all of them.
    fleet, hardware = replace(on, stride=on.stride * exchange.fold), on.hardware
    ring = RingRanks(fleet, sizes.threads, record)
    ranks = walks.forward.route.ranks
    world = ranks * exchange.fold
    sent = exchanged_bytes / world
    seconds, outer = _heads_for_rows(sent, exchange.fold, on, len(passes), world)
    now = np.zeros(ranks) + seconds + overhead(on, world) * len(passes)
    computed, outer, unknown = np.zeros(ranks), outer * world, 0.0
    spans: dict[int, list[Span]] = {rank: [] for rank in record}
    for work in passes:
        curves = _rates(hardware, work, sizes, exchange)
        unknown = max(unknown, curves.unknown(sizes.rows))
        run, calls = simulate, _calls
        if exchange.heads_at_once:
            groups = -(-sizes.kv_heads // exchange.heads_at_once)
            run, calls = partial(_gathered, groups=groups), _gathering_calls
        done = run(work, calls(work, sizes, curves, walks, on, world), ring, now)
        now = done.ended
        computed = computed + done.computed
        outer = outer + done.outer_bytes * exchange.fold
        for rank, some in done.spans.items():
            spans[rank] += some
    total = float(now.max())
    exposed = max(0.0, total - float(computed.max()))
    return RingTime(total, exposed, hardware.spread + unknown, outer, spans)


def overhead(on: Fleet, ranks: int) -> float:
    """Returns the seconds of one pass of the op beside its steps: ranks agree first."""
    hardware = on.hardware
    slower = 1.0 if hardware.cores is None else max(1.0, ranks / hardware.cores / on.nodes)
    return hardware.op * slower + hardware.inner.latency * math.ceil(math.log2(ranks))


def speedup(on: Fleet, threads: int, ranks: int) -> float:
    """Returns the rate of a rank over that of one thread alone, beside the others of its ring."""
    hardware = on.hardware
    if hardware.cores is None:
        return 1.0
    threads, ranks = min(threads, hardware.cores), ranks * on.stride * on.rings
    several = hardware.threads.get(threads, float(threads))
    return several * (hardware.shared if ranks > 1 and ranks * threads >= hardware.cores else 1.0)


def _rates(hardware: Hardware, work: PassWork, sizes: Sizes, exchange: Exchange) -> rates.Rates:
    """Returns the rates of the calls of a pass: of the heads that a rank holds or, where keys are
    gathered, of those of a group."""
    kv_heads = min(exchange.heads_at_once or sizes.kv_heads, sizes.kv_heads)
    return rates.find(
        hardware,
        work.dtype,
        work.head_dim,
        work.which,
        heads=sizes.batch * (sizes.heads // sizes.kv_heads) * kv_heads,
        kv_heads=sizes.batch * kv_heads,
        value_dim=2 * sizes.head_dim - work.head_dim,  # those of sizes are the mean
    )


def _calls(
    work: PassWork, sizes: Sizes, curves: rates.Rates, walks: Walks, on: Fleet, world: int
) -> Floats:
    """Returns seconds of the computation of each visit, ``[rank, visit]``."""
    queries_travel = work.which == "backward" and walks.travelling == "queries"
    rows = peak_memory.call_rows(sizes, work.moved, queries_travel=queries_travel)
    visible = work.moved.route.by_rank(work.moved.visible)
    speed = speedup(on, sizes.threads, world)
    seconds_of = np.empty(visible.shape)
    # Rows of several sequences are ragged beside those of another rank; among themselves never.
    stepped = peak_memory.later(work.moved) & (sizes.spaced > 1)
    for rank in range(0, len(seconds_of), _RANKS_AT_ONCE):
        some = slice(rank, rank + _RANKS_AT_ONCE)
        queries, keys, pairs = rows[0][some], rows[1][some], visible[some].astype(np.float64)
        flops = pairs * work.pair_flops
        seconds = curves.seconds(flops, queries, keys, pairs, stepped) / speed
        merging = _merging(work.which, sizes, queries, keys, on.hardware)
        merging[:, 0] = 0.0  # the own chunk comes first
        seconds_of[some] = seconds + (merging + on.hardware.call) * (pairs > 0)
    return seconds_of


def _gathering_calls(
    work: PassWork, sizes: Sizes, curves: rates.Rates, walks: Walks, on: Fleet, world: int
) -> Floats:
    """Returns seconds of the computation of each rank, ``[rank, 1]``, whose queries meet the keys
    of all ranks in one call. Nothing is merged; owners add up the gradients of their keys."""
    _, keys = peak_memory.call_rows(sizes, work.moved, queries_travel=False)
    keys = keys.sum(1)
    queries = np.full_like(keys, sizes.rows)
    pairs = work.moved.route.by_rank(work.moved.visible).sum(1).astype(np.float64)
    stepped = sizes.spaced > 0
    seconds = curves.seconds(pairs * work.pair_flops, queries, keys, pairs, stepped)
    seconds = seconds / speedup(on, sizes.threads, world) + on.hardware.call
    if work.which == "backward":
        seconds = seconds + _merging(work.which, sizes, np.zeros_like(keys), keys, on.hardware)
    return seconds[:, None]


def _merging(which: Pass, sizes: Sizes, queries: Floats, keys: Floats, on: Hardware) -> Floats:
    """Returns seconds in which a result is added to the running one in memory.

    Forward, a part becomes fp32 and is then read with the running output, which is written
    (``ringray_kernels.merge``); backward, it is added to gradients in one operation.
    """
    if on.merged:
        return np.zeros_like(queries)
    touched = sizes.batch * sizes.heads * sizes.head_dim * queries
    moved = 3 * FP32 + (sizes.itemsize + FP32) * sizes.narrow
    if which == "backward":
        touched = touched + 2 * sizes.batch * sizes.kv_heads * sizes.head_dim * keys
        moved = 2 * FP32 + sizes.itemsize
    return touched * moved / (_STREAMED * on.memory_bandwidth)


def _gathered(
    work: PassWork, seconds: Floats, ring: RingRanks, began: Floats, groups: int
) -> Finished:
    """Returns the end of a pass in which each of some groups of heads is gathered while the one
    before is computed: the shorter of both is exposed once. Cores copy messages, too."""
    moving = simulate(work, np.zeros_like(seconds), ring, began, parts=groups)
    fleet, slow = ring.fleet, slowness(ring.fleet, *seconds.shape[:2])
    computing = (seconds * slow).sum(1)
    steps = (groups - 1) * (1 + (work.which == "backward")) * fleet.hardware.step
    computed = Cores(fleet, len(computing), ring.threads).elapsed(computing + steps)
    moves = moving.ended - began
    busy, links = computed + moving.computed, moves - moving.computed
    ended = began + np.maximum(busy, moves) + np.minimum(busy, links) / groups
    spans, hop = {}, f"{work.which}, step 0"
    for rank, some in moving.spans.items():
        first, last = float(began[rank]), float(ended[rank])
        begins = last - float(busy[rank])
        waits = Span("wait", hop, "", first, begins)
        computes = Span("compute", hop, "all chunks", begins, last)
        spans[rank] = [*(span for span in some if span.kind == "transfer"), waits, computes]
    return moving._replace(ended=ended, computed=computed, spans=spans)


def _heads_for_rows(
    sent: float, fold: int, on: Fleet, passes: int, world: int
) -> tuple[float, float]:
    """Returns seconds of the exchanges of ``sent`` bytes of a rank among ``fold`` neighbouring
    ranks, there and back in each pass, and the bytes between nodes."""
    if fold == 1:
        return 0.0, 0.0
    inner, outer = on.hardware.inner, on.hardware.outer
    nodes = np.array([on.node(rank) for rank in range(world)]).reshape(-1, fold)
    near = ((nodes[:, :, None] == nodes[:, None, :]).sum(2) - 1) / (fold - 1)  # shares, by rank
    crowd, far = min(outer.ranks, on.per_node), float(1 - near.min())
    calls = 2 * passes
    if far:
        within, between = sent * near.max() / inner.bandwidth, sent * far * crowd / outer.bandwidth
        seconds = max(within, between) + calls * outer.latency
    else:
        whole = sent * fold / (fold - 1) / calls  # with what a rank keeps
        seconds = calls * collectives.seconds(on, "alltoall", fold, whole)
    if on.shares_cores:
        hardware = on.hardware
        swap = hardware.step + (fold - 1) * hardware.message
        work = sent * hardware.copying + calls * swap
        seconds += Cores(on, world).elapsed(np.full(world, work))[0]
    return float(seconds), float(sent * (1 - near.mean()))
