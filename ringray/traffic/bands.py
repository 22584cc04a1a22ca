"""Visible pairs of two pieces within a band of a mask, in closed form. Imports numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.signedinteger]


def _pairs_from(least: Ints, n: Ints, m: Ints) -> Ints:
    """Counts the (i, j) with ``0 <= i < n``, ``0 <= j < m`` and ``i - j >= least``, where ``-m <=
    least <= n``."""
    # Each i has min(i - least + 1, m) of them, if that is above 0.
    first, last = np.maximum(-least, 0), n - least
    inside = np.minimum(last, m)
    return ((inside * (inside + 1) - first * (first + 1)) >> 1) + (last - inside) * m


def band(
    apart: Ints, step: int, n: Ints, m: Ints, least: Ints, most: Ints | None
) -> tuple[Ints, ...]:
    """Returns visible pairs (i, j) with ``0 <= i < n`` and ``0 <= j < m``, of queries ``apart + i *
    step`` and keys ``j * step``, and the least and the most ``i - j`` of those that the area
    allows, within ``[-m, n]``. ``most``: None where no key is too far behind."""
    low = np.clip(-((apart - least) // step), 1 - m, n)
    seen = _pairs_from(low, n, m)
    if most is None:
        return seen, low, n - 1
    high = np.clip((most - apart) // step, -m, n - 1)
    return seen - _pairs_from(high + 1, n, m), low, high
