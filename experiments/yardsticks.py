"""Versions and clocks of this machine, and its rates of a matrix product and a copy.

    PYTHONPATH=.:kernels python experiments/yardsticks.py FILE

Appends them to FILE as JSON lines. They bound every figure of a kernel.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ringray_kernels.bench import machine, timing

TOOLS = ("nvidia-smi", "compute-sanitizer", "ncu", "gcc")
BURST_MS = 300.0  # long enough for the device's clocks and power to settle


def main(path: Path) -> None:
    """Measures and writes all facts."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")

    def write(fact: str, **values: Any) -> None:
        print(f"{fact}: {', '.join(f'{k} {v}' for k, v in values.items())}", flush=True)
        with path.open("a", encoding="utf-8") as file:
            print(json.dumps({"fact": fact, **values}), file=file)

    tools = [name for name in TOOLS if shutil.which(name)]
    facts = {"python": platform.python_version(), "cores": os.cpu_count(), "tools": tools}
    write("machine", **machine.environment(device), **facts, clocks=machine.clocks(device))
    side, length = (8192, 1 << 32) if gpu else (256, 1 << 20)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    source = torch.zeros(length, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yardsticks: dict[str, tuple[Callable[[], object], float]] = {
        f"product {side}^3, TFLOP/s": (lambda: a @ b, 2e-9 * side**3),
        "copy, GB/s read and written": (lambda: target.copy_(source), 2e-6 * length),
    }
    for name, (call, amount) in yardsticks.items():
        cold = timing.interleaved({name: [call]}, device, timing.Effort(rounds=10))[name]
        if isinstance(cold, Exception):
            raise cold
        count = round(BURST_MS / cold.median_ms) if gpu else 1
        each = {"cold": cold.median_ms, "sustained": timing.sample([call], count, 0, device)}
        rates = {how: float(f"{amount / ms:.4g}") for how, ms in each.items()}
        write(name, **rates, clocks=machine.clocks(device))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
