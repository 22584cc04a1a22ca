"""Attention of soft-capped or biased scores, or with dropout, by plain operators: the pieces that
``fused`` does not compute.

In fp32, some query rows at a time, which bounds the memory of the scores. Backward takes delta in
place of the output, and returns dK and dV summed over the query heads that share them.

Shape legend: E K/V heads of all batch entries, G query heads of each, S rows, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ringray_kernels.backends.piece import Piece
from ringray_kernels.bias import LEAST_LSE, Bias

SCORES_AT_ONCE = 1 << 22  # elements


class _Block(NamedTuple):
    """Some query rows and the keys that they may see. ``ratio``: scores / softcap (E, G * rows,
    keys), None without one; ``scores``: behind softcap and bias, -inf where a key is hidden;
    ``factors``: of weights by dropout, None without."""

    rows: slice
    keys: slice
    queries: Tensor
    ratio: Tensor | None
    bias: Bias | None
    scores: Tensor
    factors: Tensor | None


def _blocks(q: Tensor, k: Tensor, piece: Piece) -> Iterator[_Block]:
    causal, mask, scale, softcap, bias, dropped = piece
    entries, group, count, _ = q.shape
    step = max(1, SCORES_AT_ONCE // (entries * group * k.shape[1]))
    for first in range(0, count, step):
        rows = slice(first, min(first + step, count))
        keys = slice(0, rows.stop if causal else k.shape[1])
        queries = _together(q, rows)
        scores, ratio = (queries @ k[:, keys].mT).mul_(scale), None
        if softcap is not None:
            ratio = scores.div_(softcap).tanh_()
            scores = ratio * softcap
        by_row = scores.unflatten(1, (group, -1))
        part = bias and bias.part(slice(None), rows, keys)
        if part is not None:
            by_row += part.scores()
        if causal:
            later = torch.ones(by_row.shape[2:], dtype=torch.bool, device=q.device).triu_(first + 1)
            by_row.masked_fill_(later, -torch.inf)
        elif mask is not None:
            by_row.masked_fill_(mask[rows] == -torch.inf, -torch.inf)
        factors = None if dropped is None else dropped(rows, keys).flatten(1, 2)
        yield _Block(rows, keys, queries, ratio, part, scores, factors)


def _together(x: Tensor, rows: slice) -> Tensor:
    """Returns some rows of (E, G, S, D) as fp32 (E, G * rows, D)."""
    return x[:, :, rows].float().flatten(1, 2)


def forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """Returns out (E, G, S, Dv) and lse (E, G, S), fp32, of q (E, G, S, D), k and v (E, 1, S, ...).
    Every row must see a key."""
    k, v = (x[:, 0].float() for x in (k, v))
    out = torch.empty((*q.shape[:3], v.shape[2]), dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for rows, keys, _, _, _, scores, factors in _blocks(q, k, piece):
        block_lse = torch.logsumexp(scores, -1, keepdim=True)
        weights = scores.sub_(block_lse.clamp(min=LEAST_LSE)).exp_()
        if factors is not None:
            weights *= factors
        out[:, :, rows] = (weights @ v[:, keys]).unflatten(1, (q.shape[1], -1))
        lse[:, :, rows] = block_lse.squeeze(-1).unflatten(1, (q.shape[1], -1))
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, piece: Piece
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq like q, dk and dv (E, 1, S, ...), fp32. ``lse``, ``delta`` (E, G, S) may be
    global."""
    k, v = (x[:, 0].float() for x in (k, v))
    dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys, queries, ratio, part, scores, factors in _blocks(q, k, piece):
        upstream = _together(dout, rows)
        of_rows = lse[:, :, rows].flatten(1).unsqueeze(-1).clamp(min=LEAST_LSE)
        weights = scores.sub_(of_rows).exp_()
        ds = upstream @ v[:, keys].mT
        if factors is not None:
            ds *= factors
            factors *= weights
        dv[:, keys] += (weights if factors is None else factors).mT @ upstream
        ds.sub_(delta[:, :, rows].flatten(1).unsqueeze(-1)).mul_(weights)
        if part is not None:
            part.add(ds.unflatten(1, (q.shape[1], -1)))
        if ratio is not None:
            ds.mul_(ratio.square_().neg_().add_(1.0))
        ds.mul_(piece.scale)
        dq[:, :, rows] = (ds @ k[:, keys]).unflatten(1, (q.shape[1], -1))
        dk[:, keys] += ds.mT @ queries
    return dq, dk.unsqueeze(1), dv.unsqueeze(1)
