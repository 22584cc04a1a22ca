"""Table 2 of the ring attention paper: the least block whose transfer is hidden, in 1000 tokens.

    python experiments/paper/table2_minimal_block.py

F/B from the printed FLOPS and bandwidth; beside it the least block for which the simulator finds no
waiting, on ranks of that rate with links of that bandwidth: the condition is its result, not its
assumption. The sequence is six blocks.
"""

from __future__ import annotations

from comparison import Row, show

from ringray.lab.predict import cost_model, hardware
from ringray.lab.predict.hardware import Fleet
from ringray.lab.predict.layouts import TrainingRequest
from ringray.models.sizes import named
from ringray.training.recipe import Degrees

RANKS = 4
# name: TFLOP/s, GB/s one way, printed block and sequence (1000 tokens)
PRINTED = {
    "A100 NVLink": (312, 300, 1.0, 6.2),
    "A100 InfiniBand": (312, 12.5, 24.5, 149.5),
    "TPU v3": (123, 112, 1.1, 6.6),
    "TPU v4": (275, 268, 1.0, 6.2),
    "TPU v5e": (196, 186, 1.1, 6.3),
}


def flat(tflops: float, gb_s: float) -> Fleet:
    """Returns ranks that compute at one rate, whatever the size, with links without latency."""
    curves = [
        {"dtype": "bfloat16", "head_dim": 128, "direction": way, "causal": False,
         "rates": {1: tflops * 1e12}}
        for way in ("forward", "backward")
    ]  # fmt: skip
    link = {"bandwidth": gb_s * 1e9, "latency": 0.0}
    fields = {
        "title": "flat", "memory_bandwidth": 1e30, "peak": {"bfloat16": tflops * 1e12},
        "ranks_per_node": RANKS, "inner": link, "outer": link, "products": 1.0,
        "attention": curves, "spread": 0.0,
    }  # fmt: skip
    return Fleet("flat", hardware.entry(fields, "table 2"), 1, RANKS)


def least_block(on: Fleet) -> int:
    """Returns the least block, in tokens, with which no rank waits for a message."""
    request = TrainingRequest(named("llama-7b", {}), on, 1, 1)

    def waits(block: int) -> bool:
        config = request.attention(
            Degrees(cp=RANKS), seq_len=block * RANKS, causal=False, direction="forward",
            partition="contiguous",
        )  # fmt: skip
        return cost_model.predict(config, on).exposed_ms > 1e-9

    low, high = 1, 1 << 20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if waits(middle) else (low, middle)
    return high


def rows() -> list[Row]:
    """Returns block and sequence for all hardware."""
    found = []
    for name, (tflops, gb_s, block, sequence) in PRINTED.items():
        c = least_block(flat(tflops, gb_s)) / 1e3
        assert abs(c / (tflops / gb_s) - 1) < 2e-3, "the simulator contradicts c >= F/B"
        off = "F/B is 24.96, six times 149.8" if name == "A100 InfiniBand" else ""
        found.append(Row(f"{name}, block", block, c, off))
        found.append(Row(f"{name}, sequence", sequence, 6 * c, off))
    return found


if __name__ == "__main__":
    show("Table 2: minimal block and sequence, by the simulator", rows(), "1000 tokens")
