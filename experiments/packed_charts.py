"""MagiAttention's charts of packed documents on H100: measured and predicted, and ours beside.

    python experiments/packed_charts.py [--packs N]

Documents are drawn as their benchmark draws them, 8,192 tokens a GPU. Baselines are predicted as
it computes them (commit 2c64135, exps/dist_attn: benchmark_conf.py, baselines/shard.py,
ring_attn.py and usp.py):

* Each document is dealt by itself, its 2N blocks to N ranks as in ``zigzag``, so pieces are short.
* All keys and values go around the ring, whether a rank needs them or not.
* Each step is one call of FlashAttention-3, whose pieces are computed in whole tiles.
* PyTorch removes the padding before each call and puts it back after, Transformer Engine merges.

``usp`` exchanges heads for rows in the node, and is such a ring between the nodes. Ours is what
``cost_model`` predicts for the same documents; it counts no tiles that documents fill in part, and
whole documents fill 97% to 99% of tiles of 128 x 128. Figures are FLOPs of the mask over time, a
GPU, the mean over packs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.lab.predict import cost_model
from ringray.lab.predict.hardware import Curve, Direction, Fleet, Hardware, table
from ringray.lab.predict.simulator import Ports

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Batch = Sequence[Ints]  # packs, each of the lengths of its documents
Batches = Mapping[int, Batch]  # by GPUs
Strategy = tuple[str, str]  # partition and transport
Ways = Mapping[str, tuple[float, ...]]  # bars by baseline, for GPUS
Charts = Mapping[tuple[str, Direction], Ways]

CLOSE = 0.25
GPUS = (8, 16, 32, 64)
TOKENS = 8192  # a GPU
NODE = 8
HEADS, KV_HEADS, HEAD_DIM, EMBEDDING = 64, 8, 128, 1024
PAIR_FLOPS: dict[Direction, int] = {"forward": 4, "backward": 10}  # times heads and head dim

OURS: tuple[Strategy, ...] = (
    ("zigzag", "ring"), ("contiguous", "ring"), ("zigzag", "hybrid:8"), ("balanced", "direct"),
    ("balanced", "hybrid:8"),
)  # fmt: skip

# TFLOP/s a GPU, bars of assets/magi_attn/exp/distributed/h100 measured in pixels.
CAUSAL: Charts = {
    ("causal", "forward"): {"ring": (89, 69, 48, 29), "usp": (260, 251, 255, 192)},
    ("causal", "backward"): {"ring": (97, 86, 57, 29), "usp": (325, 309, 284, 195)},
}
# The same in other charts: packed documents without a causal mask; one document.
FULL: Charts = {
    ("full", "forward"): {"ring": (159.5, 135, 93, 57.6), "usp": (374, 370, 374, 291)},
    ("full", "backward"): {"ring": (161, 162, 101, 48.3), "usp": (420, 408, 375, 279.5)},
}
UNPACKED: Charts = {
    ("causal", "forward"): {"ring": (421, 454, 452, 447), "usp": (594, 589, 594, 586)},
    ("causal", "backward"): {"ring": (432, 474, 470, 458), "usp": (573, 570, 575, 572)},
}

# What no table says. Each is set by a figure of the other charts, none by one of CAUSAL.
# Rates of FlashAttention-3 beside 7 busy GPUs over its rates alone: by ``usp`` of one document on 8
# GPUs (594 and 573).
RATES: dict[Direction, float] = {"forward": 0.977, "backward": 1.022}
# Elements that PyTorch's ``scatter_`` writes in a second, one at a time: by the ring of 8 GPUs and
# one document, forward (421). Such kernels read 150e9 of bf16, pytorch/pytorch#121389 and #151612.
SCATTERED = 120e9
# Bytes/s of a hop between nodes, one message each way: by the ring of 64 GPUs without a causal
# mask, forward (57.6), whose steps take as long as those with half of the work. Other rings over
# nodes reach 14e9 to 26e9 (hardware.yaml).
HOP = 20.8e9

# Documents by length, of benchmark/datasets/default/doc_length_distribution.csv: the sampler takes
# the middle of each bin.
LENGTHS = {
    5: 30254, 30: 391188, 75: 699596, 150: 1377757, 350: 3794735, 762: 3316785, 1536: 2106566,
    3072: 988525, 6144: 410002, 12288: 173574, 24576: 115007, 49152: 18428, 98304: 22513,
    163840: 18284,
}  # fmt: skip

# Rows of queries and of keys in a tile of FlashAttention-3, by pass and causal or not.
TILES: dict[tuple[Direction, bool], tuple[int, int]] = {
    ("forward", True): (128, 128), ("forward", False): (128, 176),
    ("backward", True): (64, 128), ("backward", False): (80, 128),
}  # fmt: skip
# Bytes of memory that FlashAttention-3's backward moves for each element of Q beside the products:
# out and dout are read, an fp32 sum of dQ is cleared, added to and read, and dQ is written.
SUMMED = 2 + 2 + 4 + 8 + 4 + 2
STREAMED = 0.85  # of the bandwidth of memory, that elementwise operations reach

# TFLOP/s of FlashAttention-3 alone on an H100, head dim 128, 64 heads and 8 of keys, by rows of
# a call, 1k to 32k: bars of assets/magi_attn/exp/kernel/h100, measured in pixels.
ALONE: dict[tuple[Direction, bool], tuple[int, ...]] = {
    ("forward", False): (558, 672, 678, 674, 687, 702),
    ("forward", True): (283, 584, 663, 658, 673, 681),
    ("backward", False): (335, 453, 517, 556, 587, 601),
    ("backward", True): (208, 353, 461, 517, 561, 585),
}
# Those curves in place of measured tables, whose kernels are others.
H100 = table()["h100"].model_copy(
    update={
        "tables": None,
        "collectives": None,
        "call": 1e-5,  # a launch, a judgement
        "attention": tuple(
            Curve(
                dtype="bfloat16",
                head_dim=HEAD_DIM,
                direction=way,
                causal=causal,
                rates={1024 << power: rate * 1e12 for power, rate in enumerate(rates)},
            )
            for (way, causal), rates in ALONE.items()
        ),
    }
)
# As it ran for these charts.
MEASURED = H100.model_copy(
    update={
        "outer": H100.outer.model_copy(update={"bandwidth": HOP}),
        "attention": tuple(
            curve.model_copy(
                update={"rates": {n: r * RATES[curve.direction] for n, r in curve.rates.items()}}
            )
            for curve in H100.attention
        ),
    }
)
BANDWIDTH = STREAMED * H100.memory_bandwidth


def packs(tokens: int, count: int) -> list[Ints]:
    """Returns the first packs that their sampler draws, as lengths of documents.

    It splits documents beyond a quarter of a pack, shuffles all, cuts packs from the row of them,
    and shuffles these.
    """
    draw = np.random.default_rng(42)
    lengths, counts = (np.array([*part]) for part in (LENGTHS, LENGTHS.values()))
    most = tokens // 4
    rest = lengths % most
    whole = np.repeat(np.int32(most), (lengths // most * counts).sum())
    documents = np.concatenate([whole, np.repeat(rest, counts * (rest > 0)).astype(np.int32)])
    draw.shuffle(documents)
    ends = documents.cumsum(dtype=np.int64)
    order = [*range(ends[-1] // tokens)]
    draw.shuffle(order)
    drawn = []
    for begin in (pack * tokens for pack in order[:count]):
        inside = ends[np.searchsorted(ends, begin, "right") : np.searchsorted(ends, begin + tokens)]
        drawn.append(np.diff([begin, *inside, begin + tokens]))
    return drawn


class Kernel(NamedTuple):
    """Seconds of FlashAttention-3: of a FLOP in a whole tile, and of a row of tiles (forward of
    queries, backward of keys) beside its products."""

    flop: float
    tile: float


@cache
def kernel(direction: Direction) -> Kernel:
    """Returns what the curve of full masks says: seconds are a part of pairs and a part of rows.
    ``SUMMED`` is not in ``tile``."""
    curve = next(
        curve
        for curve in MEASURED.attention
        if (curve.head_dim, curve.direction, curve.causal) == (HEAD_DIM, direction, False)
    )
    rows, rates = (np.array([*part], np.float64) for part in (curve.rates, curve.rates.values()))
    seconds = PAIR_FLOPS[direction] * HEAD_DIM * HEADS * rows**2 / rates
    parts = np.stack([rates, rows * HEADS / seconds], 1)
    flop, row = np.linalg.lstsq(parts, np.ones(len(rows)))[0]
    if direction == "backward":
        row -= SUMMED * HEAD_DIM / BANDWIDTH
    return Kernel(flop, row * 128)


class Deal(NamedTuple):
    """Documents on the ranks of a ring. ``first``, ``second``: rows in the two blocks that a rank
    has of each document, ``[rank, document]``. ``rows``: of a rank, with padding."""

    first: Ints
    second: Ints
    rows: int
    heads: int
    kv_heads: int

    @property
    def wide(self) -> int:
        """Returns the elements of a row of Q."""
        return self.heads * HEAD_DIM

    @property
    def narrow(self) -> int:
        """Returns the elements of a row of K and V."""
        return 2 * self.kv_heads * HEAD_DIM


def deal(documents: Ints, ranks: int, fold: int) -> Deal:
    """Deals each document in two blocks to each rank; ``fold`` GPUs share the heads of its rows."""
    block = -(-documents // (2 * ranks))
    rank = np.arange(ranks)[:, None]
    first, second = (
        np.clip(documents - number * block, 0, block) for number in (rank, 2 * ranks - 1 - rank)
    )
    return Deal(first, second, int(2 * block.sum()), HEADS // fold, KV_HEADS // fold)


def triangle(rows: Ints, height: int, width: int) -> Ints:
    """Returns the tiles that cover triangles of so many rows."""
    through = np.arange(1, rows.max() // height + 1) * height
    above = np.concatenate([[0], (-(-through // width)).cumsum()])
    return above[rows // height] + (rows % height > 0) * -(-rows // width)


def attention(direction: Direction, causal: bool, held: Deal, queries: Ints, keys: Ints) -> Floats:
    """Returns seconds of a call by rank; ``queries``, ``keys``: rows, ``[rank, document]``."""
    height, width = TILES[direction, causal]
    heads, group = held.heads, 1
    if direction == "forward":  # queries of all heads that share keys fill tiles together
        heads, group = held.kv_heads, held.heads // held.kv_heads
    tall, long = -(-queries * group // height), -(-keys // width)
    tiles = triangle(queries * group, height, width * group) if causal else tall * long
    products = PAIR_FLOPS[direction] * HEAD_DIM * height * width * heads * tiles.sum(1)
    beside = (tall if direction == "forward" else long).sum(1) * heads
    seconds: Floats = (
        H100.call + kernel(direction).flop * products + kernel(direction).tile * beside
    )
    if direction == "backward":
        seconds = seconds + SUMMED * held.wide * queries.sum(1) / BANDWIDTH
    return seconds


def step(direction: Direction, causal: bool, held: Deal, number: int) -> Floats:
    """Returns seconds by rank of one step of the ring. Rank r has the keys of rank r - ``number``;
    by a causal mask its queries see their first half, or its second half of queries sees all."""
    rank = np.arange(len(held.first))
    source = (rank - number) % len(rank)
    half_keys = (causal and number > 0) & (number <= rank)
    half_queries = (causal and number > 0) & (number > rank)
    queries = held.second + held.first * ~half_queries[:, None]
    keys = held.first[source] + held.second[source] * ~half_keys[:, None]
    seen = (queries > 0) & (keys > 0)
    queries, keys = queries * seen, keys * seen
    seconds = attention(direction, causal and number == 0, held, queries, keys)
    # Elements with padding, and without.
    own = held.rows * held.wide * (1 - half_queries / 2)
    others = held.rows * held.narrow * (1 - half_keys / 2)
    q, kv = queries.sum(1) * held.wide, keys.sum(1) * held.narrow
    # Bytes: halves are copied, rows gathered; results are cleared, scattered and merged.
    if direction == "forward":
        scattered = q
        streamed = 4 * (own * half_queries + others * half_keys) + 4 * (q + kv) + 2 * own + 6 * own
    else:
        scattered = q + kv
        streamed = 4 * (3 * own * half_queries + others * half_keys) + 4 * (3 * q + kv)
        streamed = streamed + 2 * (own + others) + 6 * own + 10 * others
    return seconds + scattered / SCATTERED + streamed / BANDWIDTH


def ring(held: Deal, direction: Direction, computing: Floats, fold: int) -> float:
    """Returns seconds of a ring whose steps take ``computing``, ``[step, rank]``. Backward goes the
    other way round, and sums of gradients follow their keys and values a step later."""
    steps, ranks = computing.shape
    now, rank = np.zeros(ranks), np.arange(ranks)
    ports = Ports(Fleet("", MEASURED, ranks * fold // NODE, NODE, fold), ranks)
    to = (rank + (1 if direction == "forward" else -1)) % ranks
    chunk = 2 * held.rows * held.narrow
    for number, seconds in enumerate(computing):
        ended = now + seconds
        if ranks > 1 and (direction == "backward" or number < steps - 1):
            sent = chunk * (1 + (direction == "backward" and 0 < number < steps - 1))
            ready = np.maximum(now, now[to])
            arrived = ports.send(rank, to, np.full(ranks, float(sent)), ready)
            np.maximum.at(ended, to, arrived)
            ended = np.maximum(ended, arrived)
        now = ended
    return float(now.max())


def theirs(way: str, documents: Ints, gpus: int, direction: Direction, causal: bool) -> float:
    """Returns the seconds of a baseline, ``ring`` or ``usp``."""
    fold = NODE if way == "usp" else 1
    ranks = gpus // fold
    held = deal(documents, ranks, fold)
    numbers = range(ranks) if direction == "forward" else reversed(range(ranks))
    computing = np.stack([step(direction, causal, held, number) for number in numbers])
    # Bytes of a row: K and V are laid side by side, the output is cleared.
    streamed, exchanged = 4 * held.narrow + 2 * held.wide, 0.0
    if fold > 1:  # Q, K and V are copied before the exchange and after it, the output once
        streamed += 4 * (3 * held.wide + 2 * held.narrow)
        exchanged = 2 * (2 * held.wide + held.narrow) * (fold - 1) / fold / H100.inner.bandwidth
    around = held.rows * (streamed / BANDWIDTH + exchanged)
    if direction == "backward":  # it goes on to the weights of the projections
        products = 2 * EMBEDDING * held.rows * (held.wide + held.narrow)
        around += products / (H100.products * H100.peak["bfloat16"])
    return around + ring(held, direction, computing, fold)


def flops(documents: Ints, direction: Direction, causal: bool) -> float:
    """Returns the FLOPs of a mask."""
    pairs = (documents * (documents + 1) // 2 if causal else documents**2).sum()
    return float(PAIR_FLOPS[direction] * HEAD_DIM * HEADS * pairs)


def ours(strategy: Strategy, pack: Ints, gpus: int, on: Hardware) -> dict[Direction, float]:
    """Returns our seconds by direction, as the cost model predicts them."""
    problem: dict[str, Any] = {
        "ring_size": gpus, "seq_len": int(pack.sum()), "documents": tuple(pack.tolist()),
        "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16",
        "partition": strategy[0], "transport": strategy[1], "device": "cuda",
    }  # fmt: skip
    fleet = Fleet("h100", on, gpus // NODE, NODE)
    forward, both = (
        cost_model.predict(cost_model.causal_pass(**problem, direction=passes), fleet).time_ms / 1e3
        for passes in ("forward", "forward+backward")
    )
    return {"forward": forward, "backward": both - forward}


class Row(NamedTuple):
    """One bar of a chart, in TFLOP/s a GPU: measured and predicted."""

    way: str
    gpus: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Returns the relative error of what is predicted."""
        return self.predicted / self.measured - 1


def rate(
    seconds: Iterable[float], batch: Batch, gpus: int, direction: Direction, causal: bool
) -> float:
    """Returns TFLOP/s a GPU, the mean over the packs of a batch that take ``seconds``."""
    return mean(
        flops(pack, direction, causal) / second / gpus / 1e12
        for pack, second in zip(batch, seconds, strict=True)
    )


def chart(ways: Ways, batches: Batches, direction: Direction, causal: bool) -> list[Row]:
    """Returns the rows of a chart, for as many GPUs as there are batches."""
    rows = []
    for way, bars in ways.items():
        for gpus, measured in zip(GPUS, bars, strict=True):
            if batch := batches.get(gpus):
                seconds = [theirs(way, pack, gpus, direction, causal) for pack in batch]
                predicted = rate(seconds, batch, gpus, direction, causal)
                rows.append(Row(way, gpus, measured, predicted))
    return rows


def beside(batches: Batches) -> list[str]:
    """Returns the lines of ours, by the H100 of the table and as it ran for these charts."""
    lines = ["", "ours, causal         forward, backward; with RATES and HOP"]
    for strategy, (gpus, batch) in itertools.product(OURS, batches.items()):
        figures = []
        for hardware in (H100, MEASURED):
            seconds = [ours(strategy, pack, gpus, hardware) for pack in batch]
            for way in PAIR_FLOPS:
                passes = [both[way] for both in seconds]
                figures.append(f"{rate(passes, batch, gpus, way, True):8.1f}")
        lines.append(f"{', '.join(strategy):16} {gpus:4} {' '.join(figures)}")
    return lines


def report(title: str, charts: Charts, batches: Batches) -> tuple[list[str], list[Row]]:
    """Returns the lines of some charts, and their rows."""
    lines, every = [], []
    for (mask, direction), ways in charts.items():
        lines += ["", f"{title}, {mask}, {direction}", f"{'':16} GPUs  measured  predicted  error"]
        rows = chart(ways, batches, direction, mask == "causal")
        every += rows
        for row in rows:
            figures = f"{row.gpus:4} {row.measured:9g} {row.predicted:10.1f} {row.error:+6.0%}"
            lines.append(f"{row.way:16} {figures}")
    return lines, every


def summary(name: str, rows: Sequence[Row]) -> str:
    """Returns how many rows are close, and which is the farthest."""
    close = sum(abs(row.error) <= CLOSE for row in rows)
    worst = max(rows, key=lambda row: abs(row.error))
    return (
        f"{name}: {close} of {len(rows)} within {CLOSE:.0%}, median error "
        f"{median(abs(row.error) for row in rows):.1%}, largest {worst.error:+.1%} "
        f"({worst.way}, {worst.gpus} GPUs)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--packs", type=int, default=20, help="of each number of GPUs")
    count = parser.parse_args().packs
    batches = {gpus: packs(gpus * TOKENS, count) for gpus in GPUS}
    whole = {gpus: [np.array([gpus * TOKENS])] for gpus in GPUS}
    lines, causal = report("packed documents", CAUSAL, batches)
    lines += beside(batches)
    others, full = report("packed documents", FULL, batches)
    alone, unpacked = report("one document", UNPACKED, whole)
    lines += [*others, *alone, "", summary("packed, causal", causal)]
    lines += [summary("packed, full", full), summary("one document", unpacked)]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
