"""What a trial costs before it runs: exact FLOPs and bytes, predicted memory and time.

FLOPs and traffic are counted, not estimated: they come from the same tables that the ring executes.
Memory adds up what is live at each step (``peak_memory``). Time is the only guess: the work of
each step over a rate, or its transfers over a bandwidth, whichever is longer. Imports neither torch
nor ray.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ringray import transport
from ringray.lab.plan import peak_memory
from ringray.lab.plan.peak_memory import Sizes
from ringray.traffic import occupancy, walk
from ringray.traffic.geometry import Layout
from ringray.traffic.routes import KEPT
from ringray_kernels.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringray.traffic.geometry import Mask
    from ringray.traffic.occupancy import Walked
    from ringray.transport import Exchange

BACKWARD_FLOPS = 2.5  # five matrix products against two


@dataclass(frozen=True)
class Hardware:
    """Rates of one rank. ``flops``: FLOP/s by dtype that fused attention reaches, forward.

    ``backward``: backward's rate as a share of forward's. ``bandwidth``: bytes/s between
    neighbours, ``latency``: seconds per hop, both as the ring sees them.
    """

    name: str
    flops: Mapping[str, float]
    backward: float
    bandwidth: float
    latency: float
    cores: int | None = None  # shared by all ranks; None where each rank has a device of its own


def cpu(cores: int) -> Hardware:
    """A CPU, per thread: what ATen's flash attention reached on one core of an AMD EPYC with
    AVX-512 (fp32 and bf16 85 GFLOP/s, head dim 64), gloo over loopback."""
    flops = {"float32": 85e9, "bfloat16": 83e9, "float16": 35e9}
    return Hardware("cpu", flops, 0.8, 1.5e9, 5e-4, cores)


def interpreter(hardware: Hardware) -> Hardware:
    """``hardware`` with Triton's interpreter on it, per rank: what it reached on one core of an AMD
    EPYC, 15 to 65 MFLOP/s for head dims 16 to 128, in all types."""
    return replace(hardware, flops=dict.fromkeys(DTYPES, 40e6))


# H100 SXM class, head dim 128, bf16, 16k: the published speed of FlashAttention-2 on that chip,
# which is what ATen ships (370 TFLOP/s forward); fp32 runs on the memory-efficient kernel. NVLink.
CUDA = Hardware(
    "cuda", {"float32": 40e12, "bfloat16": 370e12, "float16": 370e12}, 0.75, 200e9, 2e-5
)


class Cost(NamedTuple):
    """What one trial costs.

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


@dataclass(frozen=True)
class Shape:
    """The sizes of one trial; see ``ringray.lab.spec.model.Problem`` for their meaning."""

    ranks: int
    threads: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    backward: bool
    transport: str = "ring"
    walk_back: str = "auto"


def predict(partition: str, padded: int, mask: Mask, shape: Shape, hardware: Hardware) -> Cost:
    """The cost of one trial of ``shape`` on a ring of ``hardware``.

    Raises:
        ValueError: the transport does not fit the ring and heads, or the walk back is impossible.
    """
    exchange = transport.plan(shape.transport, shape.ranks, shape.heads, shape.kv_heads)
    fold = exchange.fold
    layout = Layout(partition, padded, shape.ranks // fold, fold)
    itemsize = DTYPES[shape.dtype].itemsize
    ranges = layout.ranges(0)
    sizes = Sizes(
        batch=shape.batch,
        heads=shape.heads // fold,
        kv_heads=shape.kv_heads // fold,
        head_dim=shape.head_dim,
        rows=layout.rows,
        itemsize=itemsize,
        threads=shape.threads,
        fused_on_cpu=hardware.name == "cpu",
        runs=len(ranges) if ranges[0].step == 1 else 1,
        triangular=mask.causal,
    )
    row_costs = walk.costs(itemsize, sizes.batch, sizes.heads, sizes.kv_heads, sizes.head_dim)
    backward = walk.resolve_backward(shape.walk_back, shape.transport, walks=exchange.walks)
    walks = walk.choose(layout, mask, exchange.routes, backward, row_costs)
    passes: list[tuple[walk.Traffic, walk.Pass, walk.Weights]] = [
        (walks.forward, "forward", row_costs.forward)
    ]
    if shape.backward:
        passes.append((walks.backward, "backward", walks.backward_weights))

    pair_flops = 4 * shape.head_dim * shape.heads * shape.batch
    visible = walks.forward.visible
    total_visible = int(visible.sum())
    groups = -(-sizes.kv_heads // exchange.heads_at_once) if exchange.heads_at_once else 1
    flops = sent_bytes = messages = 0
    seconds = 0.0
    tables: list[Walked] = []
    for moved, which, weights in passes:
        factor = 1.0 if which == "forward" else BACKWARD_FLOPS
        flops += int(factor * 2) * total_visible * pair_flops // 2
        sent = moved.sent(which)
        sent_bytes += sent.bytes(weights) * fold
        messages += walks.tensors(which) * groups * fold
        rate = _rate(shape, hardware) * (1.0 if which == "forward" else hardware.backward)
        tables.append(occupancy.walked(moved, layout.rows, backward=which == "backward"))
        seconds += _critical_path(
            tables[-1], pair_flops / fold * factor / rate, weights, hardware, groups
        )
    exchanged = _heads_for_rows(shape, itemsize, fold, padded)
    sent_bytes += exchanged.sent_bytes
    messages += exchanged.messages
    seconds += exchanged.sent_bytes / shape.ranks / hardware.bandwidth
    work = walks.forward.route.by_rank(visible).sum(1)
    return Cost(
        flops=flops,
        sent_bytes=sent_bytes,
        messages=messages,
        peak_memory_bytes=_peak_memory(sizes, exchange, walks, tables, mask),
        time_ms=seconds * 1e3,
        balance=float(work.mean() / work.max()),
    )


class _Moved(NamedTuple):
    sent_bytes: int
    messages: int


def _heads_for_rows(shape: Shape, itemsize: int, fold: int, padded: int) -> _Moved:
    """What all ranks send when ``fold`` of them exchange heads for rows and back again: Q, K, V
    there, out and lse back; in backward dO there, dQ, dK and dV back, in their own dtype."""
    query = shape.batch * shape.heads * shape.head_dim * padded * itemsize
    key = shape.batch * shape.kv_heads * shape.head_dim * padded * itemsize
    lse = shape.batch * shape.heads * padded * walk.FP32
    moved, tensors = 2 * query + 2 * key + lse, 5
    if shape.backward:
        moved, tensors = moved + 2 * query + 2 * key, tensors + 4
    return _Moved(moved * (fold - 1) // fold, tensors * shape.ranks * (fold - 1))


def _rate(shape: Shape, hardware: Hardware) -> float:
    """FLOP/s of one rank; ranks that share cores share their rate."""
    rate = hardware.flops[shape.dtype]
    if hardware.cores is None:
        return rate
    return rate * min(shape.threads, hardware.cores / shape.ranks)


def _critical_path(
    tables: Walked, seconds_per_pair: float, weights: walk.Weights, hardware: Hardware, groups: int
) -> float:
    """Seconds of the slowest rank: at each step it computes while the next step's rows arrive.

    ``groups``: of heads, each of which walks for itself; then one computes while the next arrives.
    """
    compute = tables.visible * seconds_per_pair
    arriving = tables.chunks_in * weights.chunk + tables.sums_in * weights.sums
    transfer = arriving / hardware.bandwidth + hardware.latency * (arriving > 0)
    if groups == 1:
        return float(np.maximum(compute, transfer).sum(1).max())
    computing, moving = compute.sum(1), transfer.sum(1)
    return float((np.maximum(computing, moving) + moving / groups).max())


def _peak_memory(
    sizes: Sizes, exchange: Exchange, walks: walk.Walks, tables: list[Walked], mask: Mask
) -> int:
    """Bytes of the largest rank's tensors, its inputs included. ``tables``: one per pass."""
    backward = len(tables) > 1
    if exchange.heads_at_once is not None:
        peaks = peak_memory.gathered_peaks(
            sizes, walks.forward, exchange.heads_at_once, backward=backward
        )
    else:
        plain = mask.window is None and mask.documents is None
        peaks = peak_memory.walked_peaks(
            sizes,
            walks,
            tables[0],
            tables[1] if backward else None,
            merges=walks.forward.route.ranks > 1 or not plain,
            kept_rows=_kept_rows(walks) if backward else 0,
        )
    if exchange.fold > 1:
        peaks = peak_memory.folded_peaks(sizes, peaks, exchange.fold, backward=backward)
    return int(max(peaks))


def _kept_rows(walks: walk.Walks) -> int:
    """Rows of K/V that a rank keeps between the passes beside its own: what came last."""
    if not any(lane.source == KEPT for lane in walks.backward.route.lanes):
        return 0
    last = [lane.stop - 1 for lane in walks.forward.route.lanes]
    rows = np.maximum(walks.forward.held[1] - walks.forward.held[0], 0)[:, last]
    return int(rows.max(0).sum())
