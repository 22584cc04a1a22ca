"""Seconds of one product of matrices on one rank, by its shape.

Measured times are multiples of a launch and FLOPs at the highest measured rate, which change little
from one shape to the next. Imports numpy only.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ringray.lab.predict import measured, rates
from ringray.lab.predict.hardware import Hardware
from ringray.lab.predict.measured import Floats


@lru_cache(maxsize=1 << 14)
def seconds(hardware: Hardware, dtype: str, m: int, k: int, n: int) -> float:
    """Returns the seconds of a product (m x k)(k x n) on one rank with one thread: between measured
    ones of 16 bits, scaled by the peaks, or else by the peak and ``products``."""
    peak, flops = rates.peak(hardware, dtype), 2.0 * m * k * n
    if hardware.tables is None:
        return flops / (peak * hardware.products)
    launch, highest, factors = shapes(hardware.tables)
    by_n = ((width, measured.between(k, curves.items())) for width, curves in factors.items())
    rows = np.log(measured.read(hardware.tables)["product"].at)
    factor = float(np.exp(np.interp(np.log(m), rows, measured.between(n, by_n))))
    return factor * (launch + flops / highest) * rates.peak(hardware, "bfloat16") / peak


@lru_cache(maxsize=16)
def shapes(system: str) -> tuple[float, float, dict[int, dict[int, Floats]]]:
    """Returns the seconds of a launch, the highest FLOP/s, and logarithms of measured times over
    what both say, by n and then by k, at the measured m."""
    table = measured.read(system)["product"]
    flops = {key: 2.0 * key[0] * key[1] * table.at for key in table.seconds}
    launch = float(min(times.min() for times in table.seconds.values()))
    highest = float(max((flops[key] / times).max() for key, times in table.seconds.items()))
    factors: dict[int, dict[int, Floats]] = {}
    for (n, k), times in table.seconds.items():
        factors.setdefault(n, {})[k] = np.log(times / (launch + flops[n, k] / highest))
    return launch, highest, factors
