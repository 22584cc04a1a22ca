"""Dealing of packed documents: balance and traffic, measured pairs, new boundaries at every step.

    python experiments/balanced.py deal                # balance and rows received, both tables
    python experiments/balanced.py pairs [--ranks 2]   # balanced + direct beside zigzag + ring
    python experiments/balanced.py batches             # time and memory of 10,000 batches

``deal``: documents drawn from the tables of ``experiments/lengths``, 16,384 tokens a rank, 20 draws
each. Balance is the mean work of a rank over the largest; received are the most K/V rows that a
rank needs from others, over its own rows.

``pairs``: real rings of processes with one thread each, forward and backward in interleaved pairs,
of 16,384 tokens whose documents (the first draws) give ``zigzag`` a balance of at most 0.6, and of
one document; the slowest rank counts.

``batches``: one process deals and plans new boundaries for a ring of two, and calls the op on its
part.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

import ringray
from ringray import transport
from ringray.lab.trial import lengths
from ringray.traffic import script, walk
from ringray.traffic.deal import Deal, deal
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask

TABLES = Path(__file__).parent / "lengths"
ROWS, DRAWS = 16_384, 20
PARTITIONS = ("contiguous", "zigzag", "striped", "zigzag-token", "balanced")
UNEVEN = 0.6  # most balance of zigzag in measured pairs
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints rows of the same columns as a table."""
    cells = [[*rows[0]], *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(x.ljust(width) for x, width in zip(line, widths, strict=True)).rstrip())


def boundaries(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the boundaries of documents of some lengths."""
    return (0, *itertools.accumulate(sizes))


def planned(dealt: Deal, rank: int) -> None:
    """Plans both passes of one rank, as a call does."""
    exchange = transport.plan("direct", dealt.world_size, 32, 8)
    layout, costs = Layout(dealt, dealt.padded, dealt.world_size), walk.costs(2, 1, 32, 8, 128)
    walks = walk.choose(layout, dealt.mask, exchange.routes, "planned", costs)
    script.write(walks.forward, "forward", layout.rows, rank)
    script.write(walks.backward, "backward", layout.rows, rank)


def dealing() -> list[dict[str, Any]]:
    """Returns a row for each table and number of ranks."""
    table_rows = []
    for path in sorted(TABLES.glob("*.csv")):
        table = lengths.read(path)
        for ranks in (8, 16, 32, 64):
            figures: dict[str, list[tuple[float, float, float]]] = {}
            milliseconds = []
            for seed in range(DRAWS):
                documents = boundaries(lengths.drawn(table, ranks * ROWS, seed))
                mask = Mask(ranks * ROWS, documents=documents)
                began = time.perf_counter()
                planned(deal(mask, ranks), ranks // 2)
                milliseconds.append((time.perf_counter() - began) * 1e3)
                for name in PARTITIONS:
                    dealt = deal(mask, ranks, name)
                    received = np.array(dealt.rows_received) / ROWS
                    figures.setdefault(name, []).append(
                        (dealt.balance, float(received.max()), float(received.mean()))
                    )
            for name, each in figures.items():
                balance, most, mean = np.array(each).T
                table_rows.append({
                    "table": path.stem, "ranks": ranks, "partition": name,
                    "balance": round(float(balance.mean()), 3),
                    "least_balance": round(float(balance.min()), 3),
                    "most_received": round(float(most.mean()), 2),
                    "mean_received": round(float(mean.mean()), 2),
                    "plan_ms": "", "longest_plan": "",
                })  # fmt: skip
            table_rows[-1]["plan_ms"] = round(statistics.median(milliseconds), 1)
            table_rows[-1]["longest_plan"] = round(max(milliseconds), 1)
    return table_rows


def call(partition: Any, way: str, documents: tuple[int, ...]) -> Callable[[], None]:
    """Returns a forward and backward pass of this rank."""
    rows = documents[-1] // dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    q, dout = (torch.randn(1, HEADS, rows, HEAD_DIM) for _ in range(2))
    k, v = (torch.randn(1, KV_HEADS, rows, HEAD_DIM) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def work() -> None:
        out = ringray.ring_attention(
            *leaves, cu_seqlens=documents, partition=partition, transport=way
        )
        torch.autograd.grad(out, leaves, dout)

    return work


def uneven(ranks: int, count: int = 3) -> list[tuple[int, ...]]:
    """Returns the boundaries of the first draws that zigzag deals unevenly."""
    table, batches = lengths.read(TABLES / "magi.csv"), []
    for seed in itertools.count():
        documents = boundaries(lengths.drawn(table, ROWS, seed))
        if deal(Mask(ROWS, documents=documents), ranks, "zigzag").balance <= UNEVEN:
            batches.append(documents)
            if len(batches) == count:
                return batches
    raise AssertionError


def seconds(work: Callable[[], None]) -> float:
    """Returns the time of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    work()
    longest = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def one_rank(rank: int, ranks: int, folder: str, turns: int) -> None:
    """Runs one rank of the pairs; rank 0 prints them."""
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    results = []
    for documents in (*uneven(ranks), (0, ROWS)):
        mask = Mask(ROWS, documents=documents)
        dealt = deal(mask, ranks)
        ours, theirs = call(dealt, "direct", documents), call("zigzag", "ring", documents)
        ours(), theirs()
        pairs = []
        for turn in range(turns):
            order = (ours, theirs) if turn % 2 else (theirs, ours)
            times = {work: seconds(work) for work in order}
            pairs.append((times[ours], times[theirs]))
        each = [a / b for a, b in pairs]
        results.append({
            "ranks": ranks, "documents": len(documents) - 1, "pairs": turns,
            "balance": round(dealt.balance, 3),
            "balance_of_zigzag": round(deal(mask, ranks, "zigzag").balance, 3),
            "balanced_ms": round(statistics.median(a for a, _ in pairs) * 1e3, 1),
            "zigzag_ms": round(statistics.median(b for _, b in pairs) * 1e3, 1),
            "ratio": round(statistics.median(each), 3),
            "least_ratio": round(min(each), 3), "most_ratio": round(max(each), 3),
        })  # fmt: skip
    dist.destroy_process_group()
    if rank == 0:
        show(results)


def measured(ranks: int, turns: int) -> None:
    """Starts the ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=one_rank, args=(rank, ranks, folder, turns))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


def batches(count: int) -> list[dict[str, Any]]:
    """Returns memory and time of a batch after each tenth of ``count`` different batches."""
    torch.set_num_threads(1)
    tokens, process, draw = 2_048, psutil.Process(), random.Random(0)
    inputs = [torch.randn(1, 1, tokens, 16, requires_grad=True) for _ in range(3)]
    rows, began = [], time.perf_counter()
    for number in range(1, count + 1):
        cuts = sorted(draw.sample(range(1, tokens), draw.randint(2, 30)))
        mask = Mask(tokens, documents=(0, *cuts, tokens))
        planned(deal(mask, 2), 0)  # for a ring of two
        alone = deal(mask, 1)
        out = ringray.ring_attention(
            *inputs, cu_seqlens=mask.boundaries, partition=alone, transport="direct"
        )
        torch.autograd.grad(out.sum(), inputs)  # type: ignore[union-attr]
        if number % (count // 10) == 0:
            gc.collect()
            ms = (time.perf_counter() - began) * 1e3 / (count // 10)
            megabytes = process.memory_info().rss / 2**20
            rows.append({"batches": number, "mib": round(megabytes), "ms": round(ms, 2)})
            began = time.perf_counter()
    return rows


def main() -> None:
    """Runs one of the three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["deal", "pairs", "batches"])
    parser.add_argument("--ranks", type=int, choices=[2, 4], default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--count", type=int, default=10_000)
    options = parser.parse_args()
    if options.what == "pairs":
        measured(options.ranks, options.turns)
    else:
        result = dealing() if options.what == "deal" else batches(options.count)
        show(result)


if __name__ == "__main__":
    main()
