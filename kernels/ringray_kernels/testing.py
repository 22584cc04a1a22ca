"""The definition of correctness: inputs, the fp64 oracle, the yardstick and the error budget.

The tests, the ``correctness`` kind and the benchmark share it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringray_kernels.intervals import visible_range

BUDGET_FACTOR = 2.0
BUDGET_FLOOR = 1e-6


class Gradients(NamedTuple):
    """Output and gradients of one attention: out, dq (B, Hq, S, D), dk, dv (B, Hkv, S, D)."""

    out: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


def make_inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    seq_len: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    seed: int,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v, dout of standard normal values, equal on all ranks and devices by seed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [heads, kv_heads, kv_heads, heads]
    q, k, v, dout = (
        torch.randn(batch, h, seq_len, head_dim, generator=generator).to(dtype).to(device)
        for h in shapes
    )
    return q, k, v, dout


def visible(
    seq_len: int, *, causal: bool, device: str | torch.device = "cpu", **mask: Any
) -> Tensor:
    """Returns the (S, S) bool mask of the keys that each query sees; ``mask``: as for
    ``visible_range``."""
    positions = torch.arange(seq_len, device=device)
    low, high = visible_range(positions, seq_len, causal=causal, **mask)
    return (positions >= low[:, None]) & (positions < high[:, None])


def _grouped(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def oracle(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, seen: Tensor, *, scale: float
) -> Gradients:
    """Computes attention and its gradients in fp64 by autograd; ``seen`` (S, S) as ``visible``."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (_grouped(x, q.shape[1]) for x in leaves[1:])
    scores = (leaves[0] @ wide_k.transpose(-1, -2) * scale).masked_fill(~seen, -math.inf)
    blind = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    out = weights @ wide_v
    if dout is None:
        return Gradients(out.detach(), None, None, None)
    return Gradients(out.detach(), *torch.autograd.grad(out, leaves, dout.double()))


def yardstick(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    seen: Tensor,
    *,
    scale: float,
    causal: bool,
) -> Gradients:
    """Computes single-process *flash* SDPA on the same inputs in the same dtype, never its math
    path."""
    leaves = [
        x.detach().clone(memory_format=torch.contiguous_format).requires_grad_(dout is not None)
        for x in (q, k, v)
    ]
    wide_k, wide_v = (_grouped(x, q.shape[1]) for x in leaves[1:])
    triangle = causal and torch.equal(seen, torch.ones_like(seen).tril())
    mask = None
    if not triangle and not bool(seen.all()):
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -math.inf)
    backends = [torch.nn.attention.SDPBackend.FLASH_ATTENTION]
    if q.is_cuda:  # CUDA's flash takes neither masks nor fp32
        backends.append(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION)
    with torch.nn.attention.sdpa_kernel(backends):
        out = torch.nn.functional.scaled_dot_product_attention(
            leaves[0], wide_k, wide_v, attn_mask=mask, is_causal=triangle, scale=scale
        )
        if dout is None:
            return Gradients(out.detach(), None, None, None)
        return Gradients(out.detach(), *torch.autograd.grad(out, leaves, dout))


def budget_share(got: Tensor, want: Tensor, reference: Tensor, dout: Tensor) -> float:
    """Returns the error of ``got`` over its budget: at most 1 is right; NaN and inf never are.

    The budget is ``2 * |reference - want| / |want| + 1e-6`` in norms over the whole tensor, where
    ``want`` is the oracle and ``reference`` the yardstick; if the oracle is zero, the norm of
    ``dout`` replaces its norm.
    """
    norm = float(want.double().norm()) or float(dout.double().norm()) or 1.0
    error = float((got.double() - want.double()).norm()) / norm
    allowed = BUDGET_FACTOR * float((reference.double() - want.double()).norm()) / norm
    share = error / (allowed + BUDGET_FLOOR)
    return share if math.isfinite(share) else math.inf
