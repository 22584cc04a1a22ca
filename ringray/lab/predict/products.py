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
    table, launch, highest = shapes(hardware.tables)
    factor: Floats = np.array(list(table.values()))
    for axis, place in enumerate((n, k, m)):
        places = sorted({shape[axis] for shape in table})
        factor = factor.reshape(len(places), -1)
        factor = measured.between(place, zip(places, factor, strict=True))
    time = float(np.exp(factor)[0]) * (launch + flops / highest)
    return time * rates.peak(hardware, "bfloat16") / peak


@lru_cache(maxsize=16)
def shapes(system: str) -> tuple[dict[tuple[int, int, int], float], float, float]:
    """Returns logarithms of measured times over the shape, by n, k and m in order; the seconds of a
    launch, and the highest FLOP/s."""
    table = measured.read(system)["product"]
    times = {
        (n, k, int(m)): float(time)
        for (n, k), curve in sorted(table.seconds.items())
        for m, time in zip(table.at, curve, strict=True)
    }
    launch = min(times.values())
    highest = max(2.0 * n * k * m / time for (n, k, m), time in times.items())
    factors = {
        (n, k, m): float(np.log(time / (launch + 2.0 * n * k * m / highest)))
        for (n, k, m), time in times.items()
    }
    return factors, launch, highest
