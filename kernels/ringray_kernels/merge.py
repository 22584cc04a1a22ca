"""Merging two partial attentions of the same queries over disjoint keys.

With ``lse`` the natural log of the sum of exponentials over each part's keys::

    lse = logaddexp(lse_a, lse_b)
    out = out_a + (out_b - out_a) * sigmoid(lse_b - lse_a)

so merge(A, B) = attention(A u B). A part that sees no key has lse = -inf and out = 0.

An lse is rounded to fp32 once per part and merge, by at most 2 ** -24 of itself, and the weights of
a merge are wrong by that much: 6e-6 at an lse of 100. Rounded scores are no more exact than that;
scores that fp32 holds exactly lose it.

An attention sink is one more logit per head that takes part in the softmax without a value: a part
with lse = sink and out = 0, merged into rows that see a key. Backward then runs with the merged lse
and out, and the gradient of the sink is -sum of exp(sink - lse) * delta over the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges a part into ``out`` (..., S, D) and ``lse`` (..., S), both fp32, in place.

    ``part_out`` may have any floating dtype. Either or both lse may be -inf.
    """
    # Not by the sum, whose rounding would be one more. -inf - (-inf) is NaN: a part without keys
    # adds nothing.
    weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == -torch.inf, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def merged(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the merge of N parts of the same queries, with a first dimension of 1.

    ``out`` (B, N, S, D) and ``lse`` (B, N, S), fp32, become (1, B, S, D) and (1, B, S). Any lse may
    be -inf.
    """
    total = torch.logsumexp(lse, 1, keepdim=True)
    weight = torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0))
    return (out * weight.unsqueeze(-1)).sum(1).unsqueeze(0), total.transpose(0, 1)


def merge_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Merges ``sinks`` (H,), any floating dtype, into ``out`` (B, H, S, D), any floating dtype, and
    ``lse`` fp32 (B, H, S), in place. Rows that see no key keep out 0 and lse -inf."""
    logits, blind = sinks.float().unsqueeze(-1), lse == -torch.inf
    out.mul_(torch.sigmoid(lse - logits).masked_fill_(blind, 0.0).unsqueeze(-1))
    torch.logaddexp(lse, logits, out=lse).masked_fill_(blind, -torch.inf)


def sink_gradients(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Returns the gradient of ``sinks``, fp32 (H,), from the rows of the merged ``lse`` and their
    ``delta`` (see ``api.delta``), fp32 (B, H, S)."""
    weights = torch.exp(sinks.float().unsqueeze(-1) - lse).masked_fill_(lse == -torch.inf, 0.0)
    return -(weights * delta).sum((0, 2))
