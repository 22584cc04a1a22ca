"""A piece of a hop: some query rows and some keys, which one call of ``fused``, of ``composed`` or
of a vendor's kernels computes.

Shape legend: E K/V heads of all batch entries, G query heads of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ringray_kernels.bias import Bias

# Returns the factors of weights, (E, G, rows, keys), of some query rows and keys.
Dropped = Callable[[slice, slice], Tensor]


class Piece(NamedTuple):
    """Rule by which some query rows see some keys: all of them, those up to their own row if
    ``causal``, or by an additive ``mask`` (Sq, Sk); and what becomes of a score and of a weight."""

    causal: bool
    mask: Tensor | None
    scale: float
    softcap: float | None = None
    bias: Bias | None = None
    dropped: Dropped | None = None
