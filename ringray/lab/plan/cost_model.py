"""Predicted cost of a trial: exact FLOPs and bytes, predicted memory and time.

FLOPs and traffic are counted from the same tables that the ring executes. Memory adds up the live
tensors of each step (``peak_memory``). Time is a guess: at each step the longer of work over a rate
and transfers over a bandwidth. Imports neither torch nor ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ringray import partition, transport
from ringray.lab.plan import peak_memory
from ringray.lab.plan.peak_memory import Sizes
from ringray.lab.trial.config import TrialConfig
from ringray.traffic import occupancy, tree, walk
from ringray.traffic.geometry import Layout
from ringray.traffic.occupancy import Walked
from ringray.transport import Exchange
from ringray_kernels.dtypes import DTYPES

BACKWARD_FLOPS = 2.5  # over those of forward: five matrix products against two
_MESSAGES_HELD = 4  # outputs of a step of decoding that live at once: parts, their merge, messages


@dataclass(frozen=True)
class Hardware:
    """Rates of one rank. ``flops``: FLOP/s of fused attention by dtype, forward; ``backward``: rate
    of the backward pass over that. ``bandwidth``: bytes/s between neighbours; ``latency``: seconds
    per hop."""

    flops: Mapping[str, float]
    backward: float
    bandwidth: float
    latency: float
    cores: int | None = None  # shared by all ranks; None if each rank has a device of its own
    memory: float = 10e9  # bytes/s of keys and values in decoding, per thread or device


def cpu(cores: int) -> Hardware:
    """Returns the rates of a CPU, per thread: ATen's flash attention on one core of an AMD EPYC
    with AVX-512 (fp32 and bf16 85 GFLOP/s, head dim 64), gloo over loopback."""
    flops = {"float32": 85e9, "bfloat16": 83e9, "float16": 35e9}
    return Hardware(flops, 0.8, 1.5e9, 5e-4, cores)


def interpreter(hardware: Hardware) -> Hardware:
    """Returns ``hardware`` with the rate of Triton's interpreter, per rank: 15 to 65 MFLOP/s on one
    core of an AMD EPYC for head dims 16 to 128, in all types."""
    return replace(hardware, flops=dict.fromkeys(DTYPES, 40e6))


# H100 SXM class, head dim 128, bf16, 16k: the published speed of FlashAttention-2 on that chip,
# which is what ATen ships (370 TFLOP/s forward); fp32 runs on the memory-efficient kernel. NVLink.
CUDA = Hardware(
    {"float32": 40e12, "bfloat16": 370e12, "float16": 370e12}, 0.75, 200e9, 2e-5, memory=2.5e12
)


class Cost(NamedTuple):
    """Cost of one trial.

    ``flops``: all ranks, one pass as timed. ``sent_bytes``, ``messages``: all ranks, exact.
    ``peak_memory_bytes``: the largest rank's tensors, its inputs included. ``time_ms``: critical
    path. ``balance``: mean rank's work over the largest rank's, 1 is even.
    """

    flops: int
    sent_bytes: int
    messages: int
    peak_memory_bytes: int
    time_ms: float
    balance: float


def predict(config: TrialConfig, hardware: Hardware) -> Cost:
    """Returns the cost of ``config``, which has no ``auto``, on a ring of ``hardware``.

    Raises:
        ValueError: the transport does not fit the ring and heads, or the walk back is impossible.
    """
    if config.new_tokens is not None:
        return _decoding(config, config.new_tokens, hardware)
    exchange = transport.plan(config.transport, config.ring_size, config.heads, config.kv_heads)
    fold = exchange.fold
    walks = choose_walks(config, exchange)
    sizes = _sizes(config, exchange, on_cpu=hardware.cores is not None)
    visible = walks.forward.visible
    # Products over the head dim of Q and K, and over that of V: of each one forward; three and two
    # backward.
    dims = (config.head_dim, config.value_dim)
    of_keys, of_values = (2 * dim * config.heads * config.batch for dim in dims)
    groups = -(-sizes.kv_heads // exchange.heads_at_once) if exchange.heads_at_once else 1
    exchanged_bytes, messages = _heads_for_rows(config, fold)
    flops, sent_bytes, seconds = 0, exchanged_bytes, 0.0
    tables: list[Walked] = []
    passes: tuple[walk.Pass, ...] = ("forward", "backward")
    for which in passes[: 1 + config.has_backward]:
        backward = which == "backward"
        moved = walks.backward if backward else walks.forward
        weights = walks.backward_weights if backward else walks.weights.forward
        pair_flops = 3 * of_keys + 2 * of_values if backward else of_keys + of_values
        speed = hardware.backward if backward else 1.0
        flops += int(visible.sum()) * pair_flops
        sent_bytes += moved.sent(which).bytes(weights) * fold
        messages += walks.tensors(which) * groups * fold
        table = occupancy.walked(moved, sizes.rows, backward=backward)
        pair_seconds = pair_flops / fold / (_rate(config, hardware) * speed)
        seconds += _critical_path(table, pair_seconds, weights, hardware, groups)
        tables.append(table)
    seconds += exchanged_bytes / config.ring_size / hardware.bandwidth
    work = walks.forward.route.by_rank(visible).sum(1)
    return Cost(
        flops=flops,
        sent_bytes=sent_bytes,
        messages=messages,
        peak_memory_bytes=peak_memory.peak(sizes, exchange, walks, tables),
        time_ms=seconds * 1e3,
        balance=float(work.mean() / work.max()),
    )


def _decoding(config: TrialConfig, tokens: int, hardware: Hardware) -> Cost:
    """Returns the cost of one step of decoding: a rank reads all its keys and values once, and
    sends out and lse of all queries at each of its meetings in the tree."""
    ranks, itemsize = config.ring_size, DTYPES[config.dtype].itemsize
    queries = config.batch * config.heads * tokens
    message = queries * (config.head_dim + 1) * walk.FP32
    context = config.seq_len - tokens
    rows = partition.padded_length(config.partition, context, ranks) // ranks - (-tokens // ranks)
    key_row = 2 * config.batch * config.kv_heads * config.head_dim * itemsize
    flops = 4 * config.head_dim * config.heads * config.batch * config.visible
    seen = min(rows, config.visible)  # keys
    rate = 1 if hardware.cores is None else min(config.threads, hardware.cores / ranks)
    compute = max(flops / ranks / _rate(config, hardware), seen * key_row / hardware.memory / rate)
    steps = max(len(tree.meetings(ranks, rank)) for rank in range(ranks))
    seconds = compute + steps * (hardware.latency + message / hardware.bandwidth)
    inputs = queries * config.head_dim * itemsize + tokens * key_row
    return Cost(
        flops=flops,
        sent_bytes=tree.messages(ranks) * message,
        messages=tree.messages(ranks),
        peak_memory_bytes=rows * key_row + inputs + _MESSAGES_HELD * message,
        time_ms=seconds * 1e3,
        balance=config.seq_len / ranks / rows,
    )


def alone_s(config: TrialConfig, flops: int, hardware: Hardware) -> float:
    """Returns the seconds in which one process of ``hardware``, with the threads of the baseline,
    computes a pass of ``flops``."""
    rate = hardware.flops[config.dtype]
    if hardware.cores is not None:
        rate *= min(config.baseline_threads or config.threads, hardware.cores)
    if not config.has_backward:
        return flops / rate
    return flops / (1 + BACKWARD_FLOPS) * (1 + BACKWARD_FLOPS / hardware.backward) / rate


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


def _sizes(config: TrialConfig, exchange: Exchange, *, on_cpu: bool) -> Sizes:
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
        fused_on_cpu=on_cpu,
        runs=len(ranges) if ranges[0].step == 1 else 1,
        triangular=config.causal,
        plain=config.mask.plain,
        quantized=config.quantize is not None,
    )


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


def _rate(config: TrialConfig, hardware: Hardware) -> float:
    """Returns FLOP/s of one rank; ranks that share cores share their rate."""
    rate = hardware.flops[config.dtype]
    if hardware.cores is None:
        return rate
    return rate * min(config.threads, hardware.cores / config.ring_size)


def _critical_path(
    table: Walked, seconds_per_pair: float, weights: walk.Weights, hardware: Hardware, groups: int
) -> float:
    """Returns seconds of the slowest rank, which computes while the rows of its next step arrive.

    With several ``groups`` of heads, each walks for itself and one computes while the next arrives.
    """
    compute = table.visible * seconds_per_pair
    arriving = table.chunks_in * weights.chunk + table.sums_in * weights.sums
    transfer = arriving / hardware.bandwidth + hardware.latency * (arriving > 0)
    if groups == 1:
        return float(np.maximum(compute, transfer).sum(1).max())
    computing, moving = compute.sum(1), transfer.sum(1)
    return float((np.maximum(computing, moving) + moving / groups).max())
