"""Predicted cost of a trial: exact FLOPs and bytes, predicted memory and time.

FLOPs and traffic are counted from the same tables that the ring executes. Memory adds up the live
tensors of each step (``peak_memory``). Time follows from measured or published rates of calls and
links (``ring_time``). Imports neither torch nor ray.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ringray import partition, transport
from ringray.instruments.hops import Span
from ringray.lab.predict import peak_memory, rates, ring_time
from ringray.lab.predict.hardware import Fleet
from ringray.lab.predict.peak_memory import Sizes
from ringray.lab.predict.ring_time import PassWork
from ringray.lab.trial.config import TrialConfig, shuffled
from ringray.traffic import tree, walk
from ringray.traffic.geometry import Layout
from ringray.traffic.walk import Pass
from ringray.transport import Exchange
from ringray_kernels.dtypes import DTYPES

_MESSAGES_HELD = 4  # outputs of a step of decoding that live at once: parts, their merge, messages


class Cost(NamedTuple):
    """Cost of one trial.

    ``flops``: all ranks, one pass as timed. ``sent_bytes``, ``messages``: all ranks, exact.
    ``peak_memory_bytes``: the largest rank's tensors, its inputs included. ``time_ms``: of the
    slowest rank; ``low_ms`` to ``high_ms`` is its 80% interval, ``exposed_ms`` its waits for
    messages. ``balance``: mean rank's work over the largest rank's, 1 is even. ``inner_bytes``,
    ``outer_bytes``: the part of ``sent_bytes`` within nodes and between them.
    """

    flops: int
    sent_bytes: int
    messages: int
    peak_memory_bytes: int
    time_ms: float
    balance: float
    low_ms: float
    high_ms: float
    exposed_ms: float
    inner_bytes: int
    outer_bytes: int


def predict(config: TrialConfig, on: Fleet) -> Cost:
    """Returns the cost of ``config``, which has no ``auto``, on a ring of ``on``.

    Raises:
        ValueError: the transport does not fit the ring and heads, or the walk back is impossible.
    """
    on = _seated(config, on)
    if config.new_tokens is not None:
        return _decoding(config, config.new_tokens, on)
    exchange, walks, sizes, works = _described(config, on)
    fold, visible = exchange.fold, walks.forward.visible
    exchanged_bytes, messages = _heads_for_rows(config, fold)
    flops, sent_bytes = 0, exchanged_bytes
    groups = -(-sizes.kv_heads // exchange.heads_at_once) if exchange.heads_at_once else 1
    for one in works:
        flops += int(visible.sum()) * one.pair_flops * fold
        sent_bytes += one.moved.sent(one.which).bytes(one.weights) * fold
        messages += walks.tensors(one.which) * groups * fold
    time = ring_time.of_trial(works, sizes, exchange, walks, exchanged_bytes, on)
    work = walks.forward.route.by_rank(visible).sum(1)
    return Cost(
        flops=flops,
        sent_bytes=sent_bytes,
        messages=messages,
        peak_memory_bytes=peak_memory.peak(sizes, exchange, walks, backward=config.has_backward),
        balance=float(work.mean() / work.max()),
        **_times(time.seconds, time.spread),
        exposed_ms=time.exposed * 1e3,
        inner_bytes=sent_bytes - time.outer_bytes,
        outer_bytes=time.outer_bytes,
    )


def timelines(config: TrialConfig, on: Fleet, most: int) -> dict[int, list[Span]]:
    """Returns the predicted spans of the first ranks, at ``most`` so many, of the ring in which
    chunks walk."""
    on = _seated(config, on)
    exchange, walks, sizes, works = _described(config, on)
    exchanged_bytes, _ = _heads_for_rows(config, exchange.fold)
    ranks = range(min(walks.forward.route.ranks, most))
    time = ring_time.of_trial(works, sizes, exchange, walks, exchanged_bytes, on, record=ranks)
    return time.spans


def _seated(config: TrialConfig, on: Fleet) -> Fleet:
    """Returns ``on`` with the ranks of ``config`` in their order."""
    if config.order != "shuffled" or config.layers is not None:  # a training has rings of rings
        return on
    return replace(on, order=shuffled(config.ring_size, config.seed))


def _times(seconds: float, spread: float) -> dict[str, float]:
    return {
        "time_ms": seconds * 1e3,
        "low_ms": seconds * 1e3 / (1 + spread),
        "high_ms": seconds * 1e3 * (1 + spread),
    }


def _described(
    config: TrialConfig, on: Fleet
) -> tuple[Exchange, walk.Walks, Sizes, list[PassWork]]:
    """Returns the exchange, the walks, the sizes of one rank and the work of its passes."""
    exchange = transport.plan(config.transport, config.ring_size, config.heads, config.kv_heads)
    walks = choose_walks(config, exchange)
    ways = {
        "forward": (walks.forward, walks.weights.forward),
        "backward": (walks.backward, walks.backward_weights),
    }
    works = [
        PassWork(which, *ways[which], flops // exchange.fold, config.dtype, config.head_dim)
        for which, flops in _pair_flops(config)
    ]
    return exchange, walks, _sizes(config, exchange, on), works


def _pair_flops(config: TrialConfig) -> list[tuple[Pass, int]]:
    """Returns FLOPs of a visible pair, all heads of the batch, in each pass: products over the head
    dim of Q and K, and over that of V; of each one forward, three and two backward."""
    heads = config.heads * config.batch
    of_keys, of_values = (2 * dim * heads for dim in (config.head_dim, config.value_dim))
    both: list[tuple[Pass, int]] = [
        ("forward", of_keys + of_values), ("backward", 3 * of_keys + 2 * of_values)
    ]  # fmt: skip
    return both[: 1 + config.has_backward]


def _decoding(config: TrialConfig, tokens: int, on: Fleet) -> Cost:
    """Returns the cost of one step of decoding: a rank reads all its keys and values once, and
    sends out and lse of all queries at each of its meetings in the tree."""
    ranks, itemsize, hardware = config.ring_size, DTYPES[config.dtype].itemsize, on.hardware
    queries = config.batch * config.heads * tokens
    message = queries * (config.head_dim + 1) * walk.FP32
    context = config.seq_len - tokens
    rows = partition.padded_length(config.partition, context, ranks) // ranks - (-tokens // ranks)
    key_row = 2 * config.batch * config.kv_heads * config.head_dim * itemsize
    flops = 4 * config.head_dim * config.heads * config.batch * config.visible
    seen = min(rows, config.visible)  # keys
    known = rates.find(hardware, config.dtype, config.head_dim, "forward")
    rate = ring_time.speedup(on, config.threads, ranks)
    compute = max(flops / ranks / known.full[-1], seen * key_row / hardware.memory_bandwidth) / rate
    if hardware.cores is not None:
        compute *= max(1.0, min(ranks, on.per_node) * config.threads / hardware.cores)
    sends = [
        (rank, one.peer) for rank in range(ranks) for one in tree.meetings(ranks, rank) if one.sends
    ]
    outer = sum(on.node(rank) != on.node(peer) for rank, peer in sends) * message
    link = hardware.outer if outer else hardware.inner
    steps = max(len(tree.meetings(ranks, rank)) for rank in range(ranks))
    waiting = steps * (link.latency + message / link.bandwidth)
    inputs = queries * config.head_dim * itemsize + tokens * key_row
    return Cost(
        flops=flops,
        sent_bytes=len(sends) * message,
        messages=len(sends),
        peak_memory_bytes=rows * key_row + inputs + _MESSAGES_HELD * message,
        balance=config.seq_len / ranks / rows,
        **_times(hardware.op + compute + waiting, hardware.spread),
        exposed_ms=waiting * 1e3,
        inner_bytes=len(sends) * message - outer,
        outer_bytes=outer,
    )


def alone_s(config: TrialConfig, on: Fleet) -> float:
    """Returns the seconds in which one process, with the threads of the baseline, computes the
    passes of ``config`` by itself."""
    alone = replace(
        config, ring_size=1, partition=partition.DEFAULT, transport=transport.DEFAULT,
        backward="auto", threads=config.baseline_threads or config.threads, blocks=None, replica=0,
    )  # fmt: skip
    if config.new_tokens is not None:
        return _decoding(alone, config.new_tokens, on).time_ms / 1e3
    return _alone_s(alone, replace(on, noise=None))


@lru_cache(maxsize=1 << 14)  # the strategies of a problem have one baseline
def _alone_s(alone: TrialConfig, on: Fleet) -> float:
    hardware, total = on.hardware, 0.0
    rows, pairs = np.full(1, float(alone.seq_len)), np.full(1, float(alone.visible))
    crowded = max(1.0, alone.threads / (hardware.cores or math.inf))
    for which, flops in _pair_flops(alone):
        known = rates.find(hardware, alone.dtype, alone.head_dim, which)
        (seconds,) = known.seconds(flops * pairs, rows, rows, pairs)
        call = float(seconds) / ring_time.speedup(on, alone.threads, 1) + hardware.call
        total += call * crowded + ring_time.overhead(on, 1)
    return total


def choose_walks(config: TrialConfig, exchange: Exchange) -> walk.Walks:
    """Returns the walks of both passes; raises Unwalkable if the one back is impossible."""
    fold = exchange.fold
    heads, kv_heads = config.heads // fold, config.kv_heads // fold
    itemsize = DTYPES[config.dtype].itemsize
    costs = walk.costs(
        itemsize, config.batch, heads, kv_heads, config.head_dim, config.value_dim,
        quantized=config.quantize is not None,
    )  # fmt: skip
    backward = walk.resolve_backward(config.backward, config.transport, walks=exchange.walks)
    return walk.choose(_layout(config, fold), config.mask, exchange.routes, backward, costs)


def _layout(config: TrialConfig, fold: int) -> Layout:
    return Layout(config.partition, config.padded, config.ring_size // fold, fold)


def _sizes(config: TrialConfig, exchange: Exchange, on: Fleet) -> Sizes:
    layout = _layout(config, exchange.fold)
    ranges = layout.ranges(0)
    return Sizes(
        batch=config.batch,
        heads=config.heads // exchange.fold,
        kv_heads=config.kv_heads // exchange.fold,
        head_dim=(config.head_dim + config.value_dim) // 2,
        rows=layout.rows,
        itemsize=DTYPES[config.dtype].itemsize,
        threads=config.threads,
        fused_on_cpu=on.shares_cores,
        runs=len(ranges) if ranges[0].step == 1 else 1,
        triangular=config.causal,
        plain=config.mask.plain,
        quantized=config.quantize is not None,
        spaced=len(ranges) if ranges[0].step > 1 else 0,
        tiles=on.hardware.tiles and config.dtype == "bfloat16",
    )


def rows(config: TrialConfig) -> int:
    """Returns the rows of one rank's calls."""
    exchange = transport.plan(config.transport, config.ring_size, config.heads, config.kv_heads)
    return _layout(config, exchange.fold).rows


def _heads_for_rows(config: TrialConfig, fold: int) -> tuple[int, int]:
    """Returns bytes and messages of the exchange of heads for rows among ``fold`` ranks, and back:
    Q, K, V there, out and lse back; in backward dO there, dQ, dK and dV back, in their own dtype.
    """
    rows = config.batch * config.padded
    width = config.head_dim + config.value_dim
    elements = (config.heads + config.kv_heads) * width * rows  # Q, out, K, V
    there_and_back = elements * DTYPES[config.dtype].itemsize
    moved, tensors = there_and_back + config.heads * rows * walk.FP32, 5
    if config.quantize is not None:  # Q, K and V in a byte, and their scales
        saved = DTYPES[config.dtype].itemsize - 1
        moved -= (elements - config.heads * config.value_dim * rows) * saved
        moved += (config.heads + 2 * config.kv_heads) * rows * walk.FP32
        tensors += 3
    if config.has_backward:
        moved, tensors = moved + there_and_back, tensors + 4
    return moved * (fold - 1) // fold, tensors * config.ring_size * (fold - 1)
