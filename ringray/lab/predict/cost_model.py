"""Predicted cost of a trial: exact FLOPs and bytes, predicted memory and time.

FLOPs and traffic are counted from the same tables that the ring executes. Memory adds up the live
tensors of each step (``peak_memory``). Time follows from measured or published rates of calls and
links (``ring_time``). Imports neither torch nor ray.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ringray import partition, transport
from ringray.instruments.hops import Span
from ringray.lab.predict import peak_memory, rates, ring_time
from ringray.lab.predict.hardware import Fleet
from ringray.lab.predict.peak_memory import Sizes
from ringray.lab.predict.ring_time import RingWork
from ringray.lab.predict.simulator import PassWork
from ringray.lab.trial.config import TrialConfig, TrialProblem, shuffled
from ringray.partition import Dealt
from ringray.traffic import tree, walk
from ringray.traffic.geometry import Layout
from ringray.traffic.hulls import Pass
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


def causal_pass(**fields: Any) -> TrialConfig:
    """Returns a causal pass, forward and backward, of ranks with one thread; ``fields``: its sizes,
    its device, and what else it has."""
    usual: dict[str, Any] = {
        "threads": 1, "batch": 1, "causal": True, "window": None, "documents": None,
        "direction": "forward+backward", "transport": transport.DEFAULT,
        "partition": partition.DEFAULT, "backend": "auto", "blocks": None, "placement": "pack",
        "warmup": 1, "repeats": 1, "seed": 0, "baseline": None, "baseline_threads": None,
        "replica": 0,
    }  # fmt: skip
    return TrialConfig.from_dict(usual | fields)


def predict(config: TrialConfig, on: Fleet) -> Cost:
    """Returns the cost of ``config``, which has no ``auto``, on a ring of ``on``.

    Raises:
        ValueError: the transport does not fit the ring and heads, or the walk back is impossible.
    """
    on = _placed(config, on)
    if config.problem.new_tokens is not None:
        return _decoding(config, config.problem.new_tokens, on)
    ring = _ring_work(config, on)
    sizes, exchange, walks = ring.sizes, ring.exchange, ring.walks
    fold, visible = exchange.fold, walks.forward.visible
    sent_bytes, messages = _heads_for_rows(config)
    flops, pairs = 0, int(visible.sum())
    groups = -(-sizes.kv_heads // exchange.heads_at_once) if exchange.heads_at_once else 1
    for work in ring.passes:
        flops += pairs * work.pair_flops * fold
        sent_bytes += work.moved.sent(work.which).bytes(work.weights) * fold
        messages += walks.tensors(work.which) * groups * fold
    time = ring_time.trial_time(ring, on)
    peak = peak_memory.peak(sizes, exchange, walks, backward=config.problem.has_backward)
    by_rank = walks.forward.route.by_rank(visible).sum(1)
    outer_bytes = round(time.outer_bytes)
    return Cost(
        flops=flops,
        sent_bytes=sent_bytes,
        messages=messages,
        peak_memory_bytes=peak,
        balance=float(by_rank.mean() / by_rank.max()),
        **times(time.seconds, time.spread),
        exposed_ms=time.exposed * 1e3,
        inner_bytes=sent_bytes - outer_bytes,
        outer_bytes=outer_bytes,
    )


def timelines(config: TrialConfig, on: Fleet, most: int) -> dict[int, list[Span]]:
    """Returns the predicted spans of the first ranks, at ``most`` so many, of the ring in which
    chunks walk."""
    on = _placed(config, on)
    ring = _ring_work(config, on)
    return ring_time.trial_time(ring, on, range(min(ring.walks.forward.route.ranks, most))).spans


def _placed(config: TrialConfig, on: Fleet) -> Fleet:
    """Returns ``on`` with the ranks of ``config`` in their order."""
    if config.ring.order != "shuffled":
        return on
    return replace(on, order=shuffled(config.ring.size, config.measure.seed))


def times(seconds: float, spread: float) -> dict[str, Any]:
    """Returns the fields of a cost that hold its time."""
    ms, factor = seconds * 1e3, 1 + spread
    return {"time_ms": ms, "low_ms": ms / factor, "high_ms": ms * factor}


def _ring_work(config: TrialConfig, on: Fleet) -> RingWork:
    """Returns the work of all passes, and the sizes that it has on each rank."""
    problem, exchange = config.problem, config.exchange
    walks = choose_walks(config)
    ways = {
        "forward": (walks.forward, walks.weights.forward),
        "backward": (walks.backward, walks.backward_weights),
    }
    passes = [
        PassWork(which, *ways[which], flops // exchange.fold, problem.dtype, problem.head_dim)
        for which, flops in _pair_flops(problem)
    ]
    exchanged_bytes, _ = _heads_for_rows(config)
    return RingWork(passes, _sizes(config, on), exchange, walks, exchanged_bytes)


def _pair_flops(problem: TrialProblem) -> list[tuple[Pass, int]]:
    """Returns FLOPs of a visible pair, all heads of the batch, in each pass: products over the
    head dim of Q and K, and over that of V; of each one forward, three and two backward."""
    heads = problem.heads * problem.batch
    of_keys, of_values = (2 * dim * heads for dim in (problem.head_dim, problem.value_dim))
    forward, backward = of_keys + of_values, 3 * of_keys + 2 * of_values
    both: list[tuple[Pass, int]] = [("forward", forward), ("backward", backward)]
    return both[: 1 + problem.has_backward]


def _decoding(config: TrialConfig, tokens: int, on: Fleet) -> Cost:
    """Returns the cost of one step of decoding: a rank reads all its keys and values once, and
    sends out and lse of all queries at each of its meetings in the tree."""
    problem, hardware = config.problem, on.hardware
    ranks, itemsize = config.ring.size, DTYPES[problem.dtype].itemsize
    queries = problem.batch * problem.heads * tokens
    message = queries * (problem.head_dim + 1) * walk.FP32
    context = problem.seq_len - tokens
    rows = partition.padded_length(config.strategy.partition, context, ranks) // ranks
    rows -= -tokens // ranks
    key_row = 2 * problem.batch * problem.kv_heads * problem.head_dim * itemsize
    flops = 4 * problem.head_dim * problem.heads * problem.batch * problem.visible
    seen = min(rows, problem.visible)  # keys
    curve = rates.of_problem(hardware, problem, "forward")
    rate = ring_time.speedup(on, config.ring.threads, ranks)
    reading = seen * key_row / hardware.memory_bandwidth
    compute = max(flops / ranks / curve.full[-1], reading) / rate
    if hardware.cores is not None:
        compute *= max(1.0, min(ranks, on.per_node) * config.ring.threads / hardware.cores)
    meetings = [(rank, meeting) for rank in range(ranks) for meeting in tree.meetings(ranks, rank)]
    sends = [(rank, meeting.peer) for rank, meeting in meetings if meeting.sends]
    outer = sum(on.node(rank) != on.node(peer) for rank, peer in sends) * message
    link = hardware.outer if outer else hardware.inner
    steps = max(len(tree.meetings(ranks, rank)) for rank in range(ranks))
    waiting = steps * (link.latency + message / link.bandwidth)
    inputs = queries * problem.head_dim * itemsize + tokens * key_row
    return Cost(
        flops=flops,
        sent_bytes=len(sends) * message,
        messages=len(sends),
        peak_memory_bytes=rows * key_row + inputs + _MESSAGES_HELD * message,
        balance=problem.seq_len / ranks / rows,
        **times(hardware.op + compute + waiting, hardware.spread),
        exposed_ms=waiting * 1e3,
        inner_bytes=len(sends) * message - outer,
        outer_bytes=outer,
    )


def alone_s(config: TrialConfig, on: Fleet) -> float:
    """Returns the seconds in which one process, with the threads of the baseline, computes the
    passes of ``config`` by itself."""
    problem = config.problem
    threads = config.measure.baseline_threads or config.ring.threads
    if problem.new_tokens is not None:
        alone = config.changed(ring_size=1, partition=partition.DEFAULT, threads=threads)
        return _decoding(alone, problem.new_tokens, on).time_ms / 1e3
    return _alone_s(problem, threads, replace(on, noise=None))


@lru_cache(maxsize=1 << 14)  # the strategies of a problem have one baseline
def _alone_s(problem: TrialProblem, threads: int, on: Fleet) -> float:
    hardware, total = on.hardware, 0.0
    rows, pairs = np.full(1, float(problem.seq_len)), np.full(1, float(problem.visible))
    crowded = max(1.0, threads / (hardware.cores or math.inf))
    for which, pair_flops in _pair_flops(problem):
        curve = rates.of_problem(hardware, problem, which)
        (seconds,) = curve.seconds(pair_flops * pairs, rows, rows, pairs)
        call = float(seconds) / ring_time.speedup(on, threads, 1) + hardware.call
        total += call * crowded + ring_time.overhead(on, 1)
    return total


def choose_walks(config: TrialConfig) -> walk.Walks:
    """Returns the walks of both passes; raises Unwalkable if the one back is impossible."""
    problem, strategy, exchange = config.problem, config.strategy, config.exchange
    backward = walk.resolve_backward(strategy.backward, strategy.transport, walks=exchange.walks)
    weights = walk.costs(
        DTYPES[problem.dtype].itemsize,
        problem.batch,
        problem.heads // exchange.fold,
        problem.kv_heads // exchange.fold,
        problem.head_dim,
        problem.value_dim,
        quantized=problem.quantize is not None,
    )
    return walk.choose(_layout(config), problem.mask, exchange.routes, backward, weights)


def _layout(config: TrialConfig) -> Layout:
    fold = config.exchange.fold
    return Layout(config.partition, config.padded, config.ring.size // fold, fold)


def _sizes(config: TrialConfig, on: Fleet) -> Sizes:
    problem, fold, layout = config.problem, config.exchange.fold, _layout(config)
    # By a rule all ranks hold alike pieces.
    ranks = layout.ranks if isinstance(layout.partition, Dealt) else 1
    ranges = [layout.ranges(rank) for rank in range(ranks)]
    pieces, spaced = max(map(len, ranges)), ranges[0][0].step > 1
    return Sizes(
        batch=problem.batch,
        heads=problem.heads // fold,
        kv_heads=problem.kv_heads // fold,
        head_dim=(problem.head_dim + problem.value_dim) // 2,
        rows=layout.rows,
        itemsize=DTYPES[problem.dtype].itemsize,
        threads=config.ring.threads,
        fused_on_cpu=on.shares_cores,
        runs=1 if spaced else pieces,
        longest=layout.rows if spaced else max(map(len, itertools.chain(*ranges))),
        triangular=problem.causal,
        plain=problem.mask.plain,
        quantized=problem.quantize is not None,
        spaced=pieces if spaced else 0,
        tiles=on.hardware.tiles and problem.dtype == "bfloat16",
        packs=on.hardware.packs,
    )


def rows(config: TrialConfig) -> int:
    """Returns the rows of one rank's calls."""
    return _layout(config).rows


def _heads_for_rows(config: TrialConfig) -> tuple[int, int]:
    """Returns bytes and messages of the exchange of heads for rows among some ranks, and back:
    Q, K, V there, out and lse back; in backward dO there, dQ, dK and dV back, in their own dtype.
    """
    problem, fold = config.problem, config.exchange.fold
    rows, heads, kv_heads = problem.batch * config.padded, problem.heads, problem.kv_heads
    elements = (heads + kv_heads) * (problem.head_dim + problem.value_dim) * rows  # Q, out, K, V
    there_and_back = elements * DTYPES[problem.dtype].itemsize
    moved, tensors = there_and_back + heads * rows * walk.FP32, 5
    if problem.quantize is not None:  # Q, K and V in a byte, and their scales
        saved = DTYPES[problem.dtype].itemsize - 1
        moved -= (elements - heads * problem.value_dim * rows) * saved
        moved += (heads + 2 * kv_heads) * rows * walk.FP32
        tensors += 3
    if problem.has_backward:
        moved, tensors = moved + there_and_back, tensors + 4
    return moved * (fold - 1) // fold, tensors * config.ring.size * (fold - 1)
