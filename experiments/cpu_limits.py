"""Rates of fused attention on one CPU core beside those of its matrix products.

    python experiments/cpu_limits.py

GFLOP/s of one thread, medians of interleaved repeats: products of the size of an attention tile by
the library that torch takes and by oneDNN, PyTorch's fused attention, and ``ring_attention`` alone,
which calls it. A product counts 2 x m x n x k, attention 4 x pairs x head dim.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import ringray

ROWS, HEADS, HEAD_DIM, REPEATS = 4096, 8, 64, 7
PRODUCT = 1024, 1024, 1024


def contenders(dtype: torch.dtype) -> dict[str, tuple[float, Callable[[], object]]]:
    """Returns FLOP per call and the call, by name."""
    m, n, k = PRODUCT
    a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
    q, keys, v = torch.randn(3, 1, HEADS, ROWS, HEAD_DIM, dtype=dtype)
    pairs = HEADS * ROWS * (ROWS + 1) / 2
    onednn = torch.ops.mkldnn._linear_pointwise
    return {
        "product": (2.0 * m * n * k, lambda: a @ b.T),
        "product by oneDNN": (2.0 * m * n * k, lambda: onednn(a, b, None, "none", [], "")),
        "SDPA, causal": (
            4 * pairs * HEAD_DIM,
            lambda: scaled_dot_product_attention(q, keys, v, is_causal=True),
        ),
        "ring_attention, causal": (
            4 * pairs * HEAD_DIM,
            lambda: ringray.ring_attention(q, keys, v),
        ),
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        calls = contenders(dtype)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(REPEATS + 1):  # the first is a warm-up
            for name, (_, call) in calls.items():
                began = time.perf_counter()
                call()
                if turn:
                    times[name].append(time.perf_counter() - began)
        print(f"{dtype}, GFLOP/s of one thread, median (best)")
        for name, (flop, _) in calls.items():
            median, best = (flop / f(times[name]) / 1e9 for f in (statistics.median, min))
            print(f"  {name:24} {median:6.0f} ({best:.0f})")


if __name__ == "__main__":
    main()
