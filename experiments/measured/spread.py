"""Works out the spread of each entry with tables: how far predictions were from what was measured.

    python experiments/measured/spread.py

Three errors, each the 80th percentile, as of independent parts: of attention calls that are left
out of the tables (``check.py --leave-out``), of calls that others published with other kernels
(``PUBLISHED``), and of the rings that ``experiments/published/run.py`` predicts. An entry of which
others published nothing has the errors of all that they published. Below the entries: the error of
calls without a mask, which are measured to 65,536 rows, predicted from those of fewer rows.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import check
import numpy as np
import yaml

from ringray.lab.predict import hardware, rates
from ringray.lab.predict.hardware import Direction
from ringray.lab.predict.measured import calls

RINGS = Path(__file__).resolve().parents[1] / "published"
sys.path.insert(0, str(RINGS))
import run  # noqa: E402

SHARE = 0.8


class Call(NamedTuple):
    """A published call of bf16 and head dim 128: TFLOP/s of visible pairs."""

    entry: str
    direction: Direction
    causal: bool
    heads: int  # of all sequences of a batch
    kv_heads: int
    rows: int
    rate: float


PUBLISHED = (
    # FlashAttention-2: github.com/Dao-AILab/flash-attention, both passes, 16 heads, 16k tokens.
    Call("a100", "forward", True, 32, 32, 8192, 204),
    Call("a100", "forward", True, 16, 16, 16384, 212),
    Call("a100", "backward", True, 16, 16, 16384, 181),
    # FlashAttention-3, as MagiAttention measured it.
    Call("h100", "forward", True, 64, 8, 4096, 663),
    Call("h100", "forward", True, 64, 8, 16384, 673),
    Call("h100", "forward", False, 64, 8, 16384, 687),
    Call("h100", "backward", True, 64, 8, 4096, 461),
    Call("h100", "backward", True, 64, 8, 16384, 561),
    # TLX and FlashAttention-3, batch 4: github.com/facebookexperimental/triton/pull/3582.
    Call("h100", "forward", True, 192, 192, 4096, 637),
    Call("h100", "forward", True, 192, 192, 8192, 661),
    Call("h100", "forward", True, 192, 192, 8192, 685),
    Call("h100", "backward", True, 192, 192, 8192, 539),
    # cuDNN 9.19.1 and 9.22: github.com/NVIDIA/cudnn-frontend, benchmark results.
    Call("h200", "forward", True, 64, 8, 8192, 644),
    Call("h200", "forward", True, 64, 8, 16384, 673),
    Call("h200", "forward", False, 64, 8, 16384, 702),
    Call("h200", "backward", True, 64, 8, 8192, 541),
    Call("h200", "backward", True, 64, 8, 16384, 579),
    Call("gb200", "forward", True, 64, 8, 16384, 1708),
    Call("gb200", "backward", True, 64, 8, 16384, 1328),
    Call("gb300", "forward", True, 64, 8, 16384, 1915),
    Call("gb300", "backward", True, 64, 8, 16384, 1507),
    # cuDNN, as MagiAttention measured it. FlashAttention-4 is faster; its shapes are not said.
    Call("b200", "forward", True, 64, 8, 4096, 1287),
    Call("b200", "forward", True, 64, 8, 16384, 1324),
    Call("b200", "backward", True, 64, 8, 8192, 893),
    Call("b200", "backward", True, 64, 8, 16384, 940),
)


def error(call: Call) -> float:
    """Returns the error of a call's predicted rate, as a logarithm without sign."""
    on = hardware.table()[call.entry]
    curves = rates.find(
        on, "bfloat16", 128, call.direction, heads=call.heads, kv_heads=call.kv_heads
    )
    rows = np.full(1, float(call.rows))
    pairs = rows * (rows + 1) / 2 if call.causal else rows * rows
    factor = 4.0 if call.direction == "forward" else 10.0
    flops = factor * 128 * call.heads * pairs
    (seconds,) = curves.seconds(flops, rows, rows, pairs)
    return abs(float(np.log(flops[0] / seconds / 1e12 / call.rate)))


def rings() -> dict[str, list[float]]:
    """Returns the errors of published rings by device."""
    by_device: dict[str, list[float]] = {}
    for name in ("magi-attention", "ring-flash-attention", "usp"):
        path = RINGS / f"{name}.yaml"
        devices = [one["device"] for one in yaml.safe_load(path.read_text())["tables"]]
        for device, table in zip(devices, run.tables(path), strict=True):
            far = [abs(float(np.log(row.ratio))) for row in table.rows]
            by_device.setdefault(device, []).extend(far)
    return by_device


def beyond(system: str, times: int) -> list[float]:
    """Returns the errors of calls of so many times the rows from which they are predicted."""
    errors = []
    if (full := calls.nearest(system, "full", 64)) is None:
        return []
    measured = full[1]
    for last in np.flatnonzero(measured.rows * times <= measured.rows[-1])[-2:]:
        fewer = {heads: seconds[: last + 1] for heads, seconds in measured.seconds.items()}
        shorter = calls.Calls(measured.rows[: last + 1], fewer)
        (longer,) = np.flatnonzero(measured.rows == measured.rows[last] * times)
        for heads, seconds in measured.seconds.items():
            predicted = shorter.time(measured.rows[longer : longer + 1], *heads)[0]
            errors.append(abs(float(np.log(predicted / seconds[longer]))))
    return errors


def percentile(errors: Iterable[float]) -> float:
    """Returns the error within which most are."""
    return float(np.quantile([*errors], SHARE))


def main() -> None:
    """Prints the three errors and the spread of each entry."""
    left_out: dict[str, list[float]] = {}
    for time, far in check.left_out():
        if time.kind in check.ATTENTION:
            left_out.setdefault(time.system, []).append(far)
    by_entry: dict[str, list[float]] = {}
    for call in PUBLISHED:
        by_entry.setdefault(call.entry, []).append(error(call))
    by_device = rings()
    print(f"{'entry':14} {'left out':>9} {'calls':>7} {'rings':>7} {'spread':>7}")
    for name, on in hardware.table().items():
        if on.tables is None:
            continue
        published = (
            percentile(every.get(name) or itertools.chain(*every.values()))
            for every in (by_entry, by_device)
        )
        parts = [percentile(left_out[on.tables]), *published]
        figures = " ".join(f"{part:7.1%}" for part in parts)
        print(f"{name:14}   {figures} {float(np.hypot.reduce(parts)):7.1%}")
    systems = [on.tables for on in hardware.table().values() if on.tables]
    for times in (2, 4, 8):
        errors = [error for system in systems for error in beyond(system, times)]
        print(f"calls of {times} times as many rows: 80% within {percentile(errors):.0%}")


if __name__ == "__main__":
    main()
