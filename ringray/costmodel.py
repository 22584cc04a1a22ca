"""What a trial costs before it runs: exact FLOPs and bytes, predicted memory and time.

FLOPs and traffic are counted, not estimated: they come from the same tables that the ring executes.
Memory adds up the buffers that the ring and the fused call hold at once. Time is the only guess:
the work of each hop over a rate, or its transfer over a bandwidth, whichever is longer. Imports
neither torch nor ray.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ringray import walk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ringray.geometry import Mask

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
FP32 = 4
TENSORS = 2  # K and V, or dK and dV
BACKWARD_FLOPS = 2.5  # five matrix products against two
CALL_ELEMENTS = 1 << 19  # ringray_kernels.backends.aten.ELEMENTS_PER_CALL


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
    return replace(hardware, flops=dict.fromkeys(ITEMSIZE, 40e6))


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
    """The sizes of one trial; see ``ringray.spec.Problem`` for their meaning."""

    ranks: int
    threads: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    backward: bool


class _Tables(NamedTuple):
    """One pass of one geometry, ``[rank, hop]``: visible pairs, and rows held at each hop."""

    visible: NDArray[np.float64]
    held: NDArray[np.float64]
    sums: NDArray[np.float64]
    sent: walk.Sent
    total_visible: int
    direction: int


@lru_cache(maxsize=16)
def _tables(
    partition: str, padded: int, ranks: int, mask: Mask, which: walk.Pass, itemsize: int
) -> _Tables:
    pairs, up, down = walk.directions(partition, padded, ranks, mask)
    moved, counted = walk.cheaper(up, down, which, itemsize, FP32)
    owner = walk.chunk_at(ranks, moved.direction)
    rank, hop = np.arange(ranks)[:, None], np.arange(ranks)[None, :]
    return _Tables(
        pairs.visible[rank, owner].astype(np.float64),
        moved.kv_rows[owner, hop].astype(np.float64),
        moved.sum_rows[owner, hop].astype(np.float64),
        counted,
        int(pairs.visible.sum()),
        moved.direction,
    )


def predict(partition: str, padded: int, mask: Mask, shape: Shape, hardware: Hardware) -> Cost:
    """The cost of one trial of ``shape`` on a ring of ``hardware``."""
    itemsize = ITEMSIZE[shape.dtype]
    forward = _tables(partition, padded, shape.ranks, mask, "forward", itemsize)
    passes = [(forward, 1.0)]
    if shape.backward:
        backward = _tables(partition, padded, shape.ranks, mask, "backward", itemsize)
        passes.append((backward, BACKWARD_FLOPS))

    pair_flops = 4 * shape.head_dim * shape.heads * shape.batch
    row_elements = TENSORS * shape.kv_heads * shape.head_dim * shape.batch
    flops = sent_bytes = messages = 0
    seconds = 0.0
    for tables, factor in passes:
        flops += int(factor * 2) * tables.total_visible * pair_flops // 2
        sent_bytes += row_elements * (tables.sent.kv_rows * itemsize + tables.sent.sum_rows * FP32)
        messages += TENSORS * tables.sent.messages
        rate = _rate(shape, hardware) * (1.0 if factor == 1.0 else hardware.backward)
        seconds += _critical_path(
            tables, pair_flops * factor / rate, row_elements, itemsize, hardware
        )
    work = forward.visible.sum(1)
    direct = shape.ranks == 1 and mask.window is None and mask.documents is None
    return Cost(
        flops=flops,
        sent_bytes=sent_bytes,
        messages=messages,
        peak_memory_bytes=_peak_memory(
            padded // shape.ranks, shape, passes, itemsize, hardware, direct=direct
        ),
        time_ms=seconds * 1e3,
        balance=float(work.mean() / work.max()),
    )


def _rate(shape: Shape, hardware: Hardware) -> float:
    """FLOP/s of one rank; ranks that share cores share their rate."""
    rate = hardware.flops[shape.dtype]
    if hardware.cores is None:
        return rate
    return rate * min(shape.threads, hardware.cores / shape.ranks)


def _critical_path(
    tables: _Tables, seconds_per_pair: float, row_elements: int, itemsize: int, hardware: Hardware
) -> float:
    """Seconds of the slowest rank: at each hop it computes while the next hop's rows arrive."""
    compute = tables.visible * seconds_per_pair
    moved = tables.held * (row_elements * itemsize) + tables.sums * (row_elements * FP32)
    arriving = np.zeros_like(moved)
    arriving[:, :-1] = moved[:, 1:]
    transfer = arriving / hardware.bandwidth + hardware.latency * (arriving > 0)
    return float(np.maximum(compute, transfer).sum(1).max())


def _peak_memory(
    shard: int,
    shape: Shape,
    passes: list[tuple[_Tables, float]],
    itemsize: int,
    hardware: Hardware,
    *,
    direct: bool,
) -> int:
    """Bytes of the largest rank: its shard, the accumulators, and the hop with most at hand.

    ``direct``: nothing is merged, so the output is written in its own dtype at once.
    """
    query = shape.batch * shape.heads * shard * shape.head_dim
    key = shape.batch * shape.kv_heads * shard * shape.head_dim
    lse = shape.batch * shape.heads * shard * FP32
    row = TENSORS * shape.batch * shape.kv_heads * shape.head_dim
    inputs = (query + TENSORS * key) * itemsize
    narrow = itemsize != FP32  # then results are other tensors than their accumulators
    call = query
    if hardware.name == "cpu":
        entry = shape.heads // shape.kv_heads * shard * shape.head_dim
        call = entry * min(shape.batch * shape.kv_heads, max(1, CALL_ELEMENTS // entry))

    forward = passes[0][0]
    hops = _chunks(forward, shard).max() * row * itemsize
    last = forward.held.max() * row * itemsize
    if direct:
        peak = inputs + query * itemsize + lse + call * itemsize
    else:
        # A call's output, and then its packed K and V or the output in fp32 to be merged.
        part = call * (itemsize + (FP32 if narrow else 0))
        ending = last + (query * itemsize if narrow else 0)
        peak = inputs + query * FP32 + lse + max(hops + part, ending)
    if len(passes) > 1:
        backward = passes[1][0]
        kept = inputs + 2 * query * itemsize + lse  # with out and dout
        gradients = (query + TENSORS * key) * FP32
        walking = _chunks(backward, shard) * row * itemsize + _sums(backward) * row * FP32
        part = call * (3 * itemsize + (FP32 if narrow else 0))
        results = inputs if narrow else 0
        delta = (2 if narrow else 1) * query * FP32
        peak = max(peak, kept + gradients + max(walking.max() + part, results), kept + delta)
    return int(peak)


def _chunks(tables: _Tables, shard: int) -> NDArray[np.float64]:
    """Rows of K/V that a rank holds beside its own, ``[rank, hop]``: what it computes with, what
    arrives, and a packed copy of what it sends on, where that is less than what it holds."""
    arriving = np.zeros_like(tables.held)
    arriving[:, :-1] = tables.held[:, 1:]
    sending = np.roll(arriving, -tables.direction, 0)
    has = tables.held.copy()
    has[:, 0] = shard
    packed = np.where(sending < has, sending, 0.0)
    return np.concatenate([tables.held + arriving + packed, np.zeros((len(has), 1))], 1)


def _sums(tables: _Tables) -> NDArray[np.float64]:
    """Rows of travelling dK/dV that a rank holds, ``[rank, hop]``, and a last hop for the way home:
    the sum that it makes, the one that leaves and the one that arrives."""
    made = np.concatenate([tables.sums, np.zeros((len(tables.sums), 1))], 1)
    leaving = np.zeros_like(made)
    leaving[:, 1:] = made[:, :-1]
    return made + leaving + np.roll(leaving, tables.direction, 0)
