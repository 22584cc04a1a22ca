"""Document 000, context parallelism: overlap (12.4), imbalance (5.2), exchanges (7), memory (12.1).

    python experiments/paper/document000.py

Its example of overlap prints what its code does not give, counts half of the FLOPs, and both
directions of the link. Ours is the simulator's. Of orders of growth, the factors are compared:
by how much memory grows when a size doubles.
"""

from __future__ import annotations

from typing import Any

from comparison import Row, show
from table2_minimal_block import flat, least_block

from ringray.lab.predict import cost_model
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.predict.rank_memory import SCORES_HELD
from ringray.models.sizes import named
from ringray.traffic import geometry
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask
from ringray.training.recipe import Degrees

N, S = 8, 128 << 10  # ranks, tokens
MODEL = named("llama-7b", {})  # 32 heads of 128, as in its example
ON = flat(312, 300)


def cost(ranks: int = N, **given: Any) -> Cost:
    """Returns the cost of the example's attention, forward without a mask unless ``given``."""
    fields = {"causal": False, "direction": "forward", "partition": "contiguous", **given}
    on = ON if ranks <= ON.per_node else flat(312, 300)
    return cost_model.predict(
        TrainingRequest(MODEL, on, S, 1).attention(Degrees(cp=ranks), **fields), on
    )


def overlap() -> list[Row]:
    """Returns the example of 12.4: one step of the ring."""
    every = cost()
    compute = every.time_ms / N
    transfer = every.sent_bytes / N / (N - 1) / 300e9 * 1e3
    return [
        Row("12.4 compute, ms", 8.59, compute, "its code gives 7.05: 2 s² d for 4 s² d FLOPs"),
        Row("12.4 transfer, ms", 0.22, transfer, "its code gives 0.447: 600 GB/s are both ways"),
        Row("12.4 compute / transfer", 39.3, compute / transfer, "its code gives 15.8"),
        Row("4.4 least block, tokens", 312e12 / 300e9, least_block(ON), "c >= F/B, simulated"),
    ]


def balance() -> list[Row]:
    """Returns the work of the last rank over that of the first, and of the largest over the mean
    if folded."""
    work = geometry.pairs(Layout("contiguous", S, N), Mask(S)).visible.sum(1)
    folded = 1 / cost(causal=True, partition="zigzag-token").balance
    return [
        Row("5.2 last rank / first rank", 2 * N, work.max() / work.min(), "2N - 1"),
        Row("6.2 zigzag-token, largest / mean", 1.0, folded),
    ]


def exchanges() -> list[Row]:
    """Returns the comparison of section 7, per rank, K and V of all heads in bf16."""
    kv = 2 * S * MODEL.head_dim * MODEL.kv_heads * 2  # bytes of the whole sequence
    gathered, ring = f"allgather:{MODEL.kv_heads}", "ring"
    found = []
    for name, transport, memory, steps in (
        ("all-gather", gathered, kv, 1), ("ring", ring, kv / N, N)
    ):  # fmt: skip
        of = cost(transport=transport)
        held = buffers(transport)
        sent = of.sent_bytes / N
        found += [
            Row(f"7 {name}: K/V beside its own, MiB", memory / 2**20, held / 2**20,
                "(N-1)/N arrive" if transport == gathered else "the next arrives, one is on"),
            Row(f"7 {name}: sent by a rank, MiB", kv / 2**20, sent / 2**20, "(N-1)/N of it"),
            Row(f"7 {name}: steps that send", steps, 1 if transport == gathered else N - 1,
                "" if transport == gathered else "N - 1 send"),
        ]  # fmt: skip
    hidden = cost(transport=gathered).exposed_ms / max(cost(transport=ring).exposed_ms, 1e-9)
    assert hidden > 1, "an all-gather is waited for, a ring is not"
    return found


def buffers(transport: str) -> float:
    """Returns bytes of K/V beside a rank's own: what goes away where K/V have one head less."""
    heads = MODEL.kv_heads
    few = heads // 2
    peaks = [
        cost(transport=transport.replace(str(heads), str(kv)), kv_heads=kv).peak_memory_bytes
        for kv in (heads, few)
    ]
    own = 2 * S / N * MODEL.head_dim * (heads - few) * 2
    return (peaks[0] - peaks[1] - own) * heads / (heads - few)


def growth() -> list[Row]:
    """Returns the table of 12.1: factors of memory when a size doubles."""
    peak = cost().peak_memory_bytes

    def factor(**given: Any) -> float:
        return cost(**given).peak_memory_bytes / peak

    scores = SCORES_HELD * MODEL.heads  # times s², of a layer without flash attention
    alone = cost(1).peak_memory_bytes
    return [
        Row("12.1 no parallelism, 2 s", 4, scores * (2 * S) ** 2 / (scores * S**2)),
        Row("12.1 flash, 2 s", 2, cost(1, seq_len=2 * S).peak_memory_bytes / alone),
        Row("12.1 flash, 2 d", 1, cost(1, head_dim=256).peak_memory_bytes / alone,
            "Q, K, V and out have d: only lse has none"),
        Row("12.1 ring + flash, 2 s", 2, factor(seq_len=2 * S)),
        Row("12.1 ring + flash, 2 N", 0.5, factor(ranks=2 * N)),
        Row("12.1 ring + flash, 2 d", 1, factor(head_dim=256), "accumulators alone have d"),
    ]  # fmt: skip


def rows() -> list[Row]:
    """Returns all comparisons."""
    return [*overlap(), *balance(), *exchanges(), *growth()]


if __name__ == "__main__":
    show("Document 000: 128k tokens, 32 heads of 128, 8 A100", rows(), "as named")
