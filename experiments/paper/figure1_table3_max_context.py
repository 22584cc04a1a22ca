"""Table 3 and figure 1 of the ring attention paper: the longest context that trains, by the memory
model, in 1000 tokens.

    python experiments/paper/figure1_table3_max_context.py
    python experiments/paper/figure1_table3_max_context.py --measured  # half an hour, 2 cores

Taken from the paper: the models, the number of devices and the memory of one (Table 2), fp32, FSDP
over all devices, one sequence a device, layers that keep their input, logits of a whole sequence
at once, powers of two. Computed: all lengths. A ring has all devices as ranks, and each holds what
fits into one rank. ``--measured`` trains a tiny model within 64 MiB a rank, and within 256 on one
rank, on this machine (figure1_max_context*.yaml); printed beside it is the gain of the table's
cells of 7B on 8x A100, where it has them.
"""

from __future__ import annotations

import sys
from typing import Any

from comparison import Row, measured, show

from ringray.lab.predict import cost_model, hardware, rank_memory
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.predict.rank_memory import Training
from ringray.models.sizes import Model, named
from ringray.training.recipe import Degrees

# Memory (GB), devices (chips), and per model: vanilla, memory-efficient, with blockwise MLP, ring.
PRINTED = {
    "8x A100 NVLink": (80, 8, {"3b": (4, 32, 64, 512), "7b": (2, 16, 32, 256),
                               "13b": (2, 4, 16, 128)}),
    "32x A100 InfiniBand": (80, 32, {"7b": (4, 64, 128, 4096), "13b": (4, 32, 64, 2048)}),
    "TPUv3-512": (16, 256, {"7b": (1, 4, 8, 2048), "13b": (1, 2, 8, 1024)}),
    "TPUv4-1024": (32, 512, {"3b": (8, 16, 32, 16384), "7b": (4, 8, 16, 8192),
                              "13b": (4, 8, 16, 4096), "30b": (2, 4, 8, 2048)}),
    "TPUv5e-256": (16, 256, {"3b": (4, 8, 32, 4096), "7b": (2, 8, 16, 2048)}),
}  # fmt: skip
# Name, and what differs: rows of the MLP at once, scores, whether K/V walk a ring.
ARCHITECTURES: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("vanilla", {"mlp_rows": None, "scores": "whole"}, False),
    ("memory-efficient attention", {"mlp_rows": None}, False),
    ("and blockwise MLP", {"mlp_rows": 1024}, False),
    ("ring", {"mlp_rows": 1024}, True),
)
BLOCKWISE = "blockwise attention, blockwise MLP"
# Of 7B on 8x A100: over blockwise attention and MLP on one device, by the ranks of a ring.
GAINS = {
    ("vanilla attention, plain MLP", 1): 2 / 32,
    ("blockwise attention, plain MLP", 1): 16 / 32,
    (BLOCKWISE, 8): 256 / 32,
}
# Cells beyond a factor of two, and why.
WHY = {
    ("8x A100 NVLink", "7b", "vanilla"): "scores of 4k take 2 GB a copy: 80 GB hold more than 2k",
    ("8x A100 NVLink", "13b", "memory-efficient attention"): (
        "a quarter of 7B's, of which each token takes 1.6 x the bytes; 32 A100 print 32k"
    ),
    ("TPUv3-512", "7b", "vanilla"): "scores of 2k take 0.5 GB a copy: 16 GB hold more than 1k",
}


def attention_bytes(model: Model, ranks: int) -> float:
    """Returns the peak of attention per token of a rank, both passes."""
    on, rows = hardware.parse_fleet("h100:1x8"), 8 << 10
    request = TrainingRequest(model, on, rows * ranks, 1, "float32")
    return cost_model.predict(request.attention(Degrees(cp=ranks)), on).peak_memory_bytes / rows


def longest(model: Model, memory: float, devices: int, how: dict[str, Any], ring: bool) -> int:
    """Returns the longest power of two, in tokens of a rank."""
    per_token = attention_bytes(model, 8 if ring else 1)  # of any ring from 3 ranks on

    def held(tokens: int) -> float:
        training = Training(tokens, devices, "float32", loss_rows=None, **how)
        degrees = Degrees(dp=devices)  # each device a sequence: a ring's rank holds as much
        return rank_memory.memory(model, degrees, training, per_token * tokens).total

    return max((1 << k for k in range(6, 24) if held(1 << k) <= memory), default=0)


def rows() -> list[Row]:
    """Returns all cells."""
    found = []
    for where, (gb, devices, models) in PRINTED.items():
        for size, printed in models.items():
            model = named(f"llama-{size}", {})
            for (name, how, ring), value in zip(ARCHITECTURES, printed, strict=True):
                tokens = longest(model, gb * 1e9, devices, how, ring)
                ranks = devices if ring else 1
                cell = f"{where}, {size.upper()}, {name}"
                why = WHY.get((where, size, name), "")
                found.append(Row(cell, value, tokens * ranks / 1024, why))
    return found


def reached() -> list[Row]:
    """Returns the longest contexts that were trained on this machine, over that of blockwise
    attention and MLP on one rank in the same memory."""
    rows = []
    for name in ("figure1_max_context_alone", "figure1_max_context"):
        found: dict[tuple[str, int], int] = {}
        for trial in measured(name):
            if trial.status == "ok":
                config = trial.config
                mlp = "blockwise" if config.get("mlp_rows") else "plain"
                attention = "vanilla" if config["scores"] == "whole" else "blockwise"
                cell = (f"{attention} attention, {mlp} MLP", config["ring_size"])
                found[cell] = max(found.get(cell, 0), config["seq_len"])
        alone = found[BLOCKWISE, 1]
        for (what, ranks), tokens in sorted(found.items(), key=lambda item: item[1]):
            printed = GAINS.get((what, ranks))
            rows.append(Row(f"{what}, ring of {ranks}", printed, tokens / alone, f"{tokens:,}"))
    return rows


if __name__ == "__main__":
    if "--measured" in sys.argv:
        show("Figure 1: longest context trained here", reached(), "of blockwise on one rank")
    else:
        show("Table 3: longest context", rows(), "1024 tokens")
