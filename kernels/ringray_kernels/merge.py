"""Merging two partial attentions of the same queries over disjoint keys.

With ``lse`` the natural log of the sum of exponentials over each part's keys::

    lse = logaddexp(lse_a, lse_b)
    out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

so merge(A, B) = attention(A u B). A part that sees no key has lse = -inf and out = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges a part into ``out`` (..., S, D) and ``lse`` (..., S), both fp32, in place.

    ``part_out`` may have any floating dtype. Either or both lse may be -inf.
    """
    total = torch.logaddexp(lse, part_lse)
    # -inf - (-inf) is NaN: a row without keys so far takes nothing from the part.
    weight = torch.exp(part_lse - total).masked_fill_(total == -torch.inf, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(total)
