"""Seconds of one product of matrices on one rank.

Imports numpy only.
"""

from __future__ import annotations

from ringray.lab.predict import rates
from ringray.lab.predict.hardware import Hardware


def seconds(hardware: Hardware, dtype: str, m: int, k: int, n: int) -> float:
    """Returns the seconds of a product (m x k)(k x n) on one rank with one thread."""
    return 2 * m * k * n / (rates.peak(hardware, dtype) * hardware.products)
