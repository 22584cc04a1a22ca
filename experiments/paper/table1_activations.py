"""Table 1 of the ring attention paper: bytes of one layer's largest activation, bf16.

    python experiments/paper/table1_activations.py

Each printed formula at LLaMA 7B, 32k tokens, blocks of 4k; then what is right: the matrix of scores
has a side per token, not per hidden, and six bf16 blocks of c x h are 12ch bytes. The last rows
are the memory model's: the tensors of a forward pass of the ring, whose result is in fp32.
"""

from __future__ import annotations

from comparison import Row, show

from ringray.lab.predict import cost_model, hardware
from ringray.lab.predict.advise import Wish
from ringray.models.sizes import named
from ringray.training.degrees import Degrees

S, C = 32 << 10, 4 << 10  # tokens of the sequence and of a block
MODEL = named("llama-7b", {})
H, N = MODEL.hidden, MODEL.heads
MIB = 1 << 20


def rows() -> list[Row]:
    """Returns all cells; batch size 1."""
    matrix = "2bns²: the matrix of scores of n heads"
    block = "12bch: six blocks of bf16"
    efficient = 2 * S * H + 4 * C * H
    cells = [
        ("vanilla, attention, 2bns²", 2 * N * S**2, 2 * N * S**2, ""),
        ("vanilla, MLP, 8bsh", 8 * S * H, 8 * S * H, ""),
        ("vanilla, total, 2bhs²", 2 * H * S**2, 2 * N * S**2, matrix),
        ("memory-efficient, attention, 2bsh + 4bch", efficient, efficient, ""),
        ("memory-efficient, total, 8bsh", 8 * S * H, 8 * S * H, ""),
        ("blockwise MLP, total, 2bsh", 2 * S * H, 2 * S * H, ""),
        ("ring, attention, 6bch", 6 * C * H, 12 * C * H, block),
        ("ring, MLP, 2bch", 2 * C * H, 2 * C * H, ""),
        ("ring, total, 6bch", 6 * C * H, 12 * C * H, block),
    ]  # fmt: skip
    found = [Row(cell, printed / MIB, right / MIB, note) for cell, printed, right, note in cells]
    ours = ring_bytes()
    note = f"{ours / (C * H):.0f}bch: Q, K, V; two of K/V on the way; out in fp32, the part to add"
    row = Row("ring, attention, the memory model", 6 * C * H / MIB, ours / MIB, note)
    return [*found, row]


def ring_bytes() -> int:
    """Returns the predicted peak of a forward pass without a mask, of a rank with C rows."""
    on, ranks = hardware.parse_fleet("h100:1x8"), S // C
    wish = Wish(MODEL, on, S, 1)
    config = wish.attention(Degrees(cp=ranks), causal=False, direction="forward")
    return cost_model.predict(config, on).peak_memory_bytes


if __name__ == "__main__":
    show("Table 1: largest activation of a layer, LLaMA 7B, s = 32k, c = 4k", rows(), "MiB")
