"""The definition of correctness: inputs, the fp64 oracle, the yardstick and the error budget.

The tests, the ``correctness`` kind and the benchmark share it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringray_kernels.dropout import Dropout
from ringray_kernels.dropout import factors as dropped
from ringray_kernels.intervals import visible_ranges

BUDGET_FACTOR = 2.0
BUDGET_FLOOR = 1e-6


class Scoring(NamedTuple):
    """Rule for scores and weights; ``softcap``, ``sinks``, ``slopes`` (``alibi_slopes``) and
    ``table`` (``distance_bias``) as in ``ringray.ring_attention``; ``factors``: of weights, (B, Hq,
    S, S), by dropout, see ``dropout_factors``."""

    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    factors: Tensor | None = None
    table: Tensor | None = None


class Gradients(NamedTuple):
    """Output and gradients of one attention: out (B, Hq, S, Dv), dq (B, Hq, S, D), dk (B, Hkv, S,
    D), dv (B, Hkv, S, Dv); dsinks (B, Hq, S), dtable (B, Hq, S, 2 R + 1): the share of each row in
    the gradient of a sink and of a table of biases; lse (B, Hq, S), of the oracle."""

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None
    dtable: Tensor | None = None
    lse: Tensor | None = None


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
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v, dout of standard normal values, equal on all ranks and devices by seed.
    ``value_dim``: head dim of v and dout; None is ``head_dim``."""
    generator = torch.Generator().manual_seed(seed)
    values = value_dim or head_dim
    shapes = [(heads, head_dim), (kv_heads, head_dim), (kv_heads, values), (heads, values)]
    q, k, v, dout = (
        _normal((batch, h, seq_len, width), generator).to(dtype).to(device) for h, width in shapes
    )
    return q, k, v, dout


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def make_sinks(heads: int, *, seed: int, device: str | torch.device = "cpu") -> Tensor:
    """Returns a sink per head, fp32 (heads,), of normal values, equal on all ranks by seed."""
    return (1.0 + _normal((heads,), torch.Generator().manual_seed(seed))).to(device)


def make_table(heads: int, reach: int, *, seed: int) -> Tensor:
    """Returns a bias of each distance, fp32 (heads, 2 * reach + 1), normal, equal by seed."""
    generator = torch.Generator().manual_seed(seed)
    return _normal((heads, 2 * reach + 1), generator)


def make_slopes(heads: int) -> Tensor:
    """Returns ALiBi's slopes, fp32 (heads,): 2 ** (-8 h / heads) of head h from 1 on."""
    return 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float32, device="cpu"))


def _numbers(size: int, device: str | torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int64, device=device)


def dropout_factors(q: Tensor, p: float, seed: int) -> Tensor | None:
    """Returns the factors of the weights of ``q`` (B, Hq, S, D) of a whole sequence, fp32 (B, Hq,
    S, S); None without dropout."""
    if not p:
        return None
    batch, heads, positions = (_numbers(size, q.device) for size in q.shape[:3])
    return dropped(Dropout(p, seed), batch[:, None], heads, positions, positions)


def visible(
    seq_len: int, *, causal: bool, device: str | torch.device = "cpu", **mask: Any
) -> Tensor:
    """Returns the (S, S) bool mask of the keys that each query sees; ``mask``: as for
    ``visible_ranges``."""
    positions = _numbers(seq_len, device)
    seen = torch.zeros(seq_len, seq_len, dtype=torch.bool, device=device)
    for low, high in visible_ranges(positions, seq_len, causal=causal, **mask):
        seen |= (positions >= low[:, None]) & (positions < high[:, None])
    return seen


def _grouped(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _distances(q: Tensor) -> Tensor:
    """Returns the distances of all pairs of rows (S, S)."""
    positions = _numbers(q.shape[2], q.device)
    return (positions - positions[:, None]).abs()


def _places(q: Tensor, table: Tensor) -> Tensor:
    """Returns the place in ``table`` (Hq, 2 R + 1) of each pair of rows (S, S)."""
    positions, reach = _numbers(q.shape[2], q.device), table.shape[1] // 2
    return (positions - positions[:, None]).clamp(-reach, reach) + reach


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    seen: Tensor,
    *,
    scale: float,
    dlse: Tensor | None = None,
    **how: Any,
) -> Gradients:
    """Computes attention and its gradients in fp64 by autograd; ``seen`` (S, S) as ``visible``;
    ``dlse``: gradient of lse (B, Hq, S), if any; ``how``: the fields of ``Scoring``."""
    softcap, sinks, slopes, factors, table = Scoring(**how)
    inputs = [q, k, v]
    if sinks is not None:
        inputs.append(sinks[:, None].expand(q.shape[:3]))
    if table is not None:
        inputs.append(table[:, None].expand(*q.shape[:3], -1))
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    wide_k, wide_v = (_grouped(x, q.shape[1]) for x in leaves[1:3])
    scores = leaves[0] @ wide_k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - _distances(q) * slopes.to(q.device).double()[..., None, None]
    if table is not None:
        scores = scores + leaves[-1].gather(-1, _places(q, table).expand_as(scores))
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, leaves[3].unsqueeze(-1)], -1)
    lse = torch.logsumexp(scores, -1)
    blind = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    weights = weights[..., : k.shape[2]]
    if factors is not None:
        weights = weights * factors
    out = weights @ wide_v
    if dout is None:
        return Gradients(out.detach(), lse=lse.detach())
    of_results = [(out, dout.double())]
    if dlse is not None:
        of_results.append((lse, dlse.double()))
    results, upstream = zip(*of_results, strict=True)
    gradients = torch.autograd.grad(results, leaves, upstream)
    names = ["dsinks"] * (sinks is not None) + ["dtable"] * (table is not None)
    extras = dict(zip([*names, "lse"], [*gradients[3:], lse.detach()], strict=True))
    return Gradients(out.detach(), *gradients[:3], **extras)


def yardstick(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    seen: Tensor,
    *,
    scale: float,
    causal: bool,
    fp8: bool = False,
    **how: Any,
) -> Gradients:
    """Computes single-process *flash* SDPA on the same inputs in the same dtype, never its math
    path; and what that does not compute by the same arithmetic, see ``_like_flash``. ``fp8``:
    weights are e4m3; ``how``: as for ``oracle``."""
    if q.shape[-1] != v.shape[-1] or fp8 or any(x is not None for x in how.values()):
        return _like_flash((q, k, v, dout, seen), scale, fp8, Scoring(**how))
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
            return Gradients(out.detach())
        return Gradients(out.detach(), *torch.autograd.grad(out, leaves, dout))


def _like_flash(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
    scale: float,
    fp8: bool,
    scoring: Scoring,
) -> Gradients:
    """Computes attention with the roundings of a flash kernel: scores and sums in fp32, operands of
    products and results in the dtype of the inputs."""
    q, k, v, dout, seen = inputs
    softcap, sinks, slopes, factors, table = scoring
    dtype, blind = q.dtype, ~seen.any(-1, keepdim=True)
    wide_q, wide_k, wide_v = (_grouped(x, q.shape[1]).float() for x in (q, k, v))
    scores = wide_q @ wide_k.mT * scale
    slope = torch.ones_like(scores)
    if softcap is not None:
        scores = torch.tanh(scores / softcap)
        slope, scores = 1 - scores**2, scores * softcap
    if slopes is not None:
        scores = scores - _distances(q) * slopes.to(q.device).float()[..., None, None]
    if table is not None:
        wide = table.float()[:, None].expand(*q.shape[:3], -1)
        scores = scores + wide.gather(-1, _places(q, table).expand_as(scores))
    lse = torch.logsumexp(scores.masked_fill(~seen, -math.inf), -1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float()[:, None, None])
    weights = torch.exp(scores - lse).masked_fill(~seen, 0.0)
    stays = 1.0 if factors is None else factors
    used = (weights * 256).to(torch.float8_e4m3fn).float() / 256 if fp8 else weights
    out = ((used * stays).to(dtype).float() @ wide_v).to(dtype)
    if dout is None:
        return Gradients(out)
    upstream = dout.float()
    delta = (upstream * out.float()).sum(-1, keepdim=True).masked_fill(blind, 0.0)
    plain = weights * (upstream @ wide_v.mT * stays - delta)
    ds = (plain * slope).to(dtype).float()
    dk, dv = (
        (x.mT @ y).to(dtype).unflatten(1, (k.shape[1], -1)).sum(2)  # as of expanded heads
        for x, y in ((ds * scale, wide_q), ((weights * stays).to(dtype).float(), upstream))
    )
    dsinks = None
    if sinks is not None:
        share = torch.exp(sinks.float()[:, None, None] - lse).masked_fill(blind, 0.0)
        dsinks = -(share * delta).squeeze(-1)
    dtable = None
    if table is not None:
        shape = (*q.shape[:3], table.shape[1])
        empty = torch.zeros(shape, dtype=torch.float32, device=q.device)
        dtable = empty.scatter_add(-1, _places(q, table).expand_as(plain), plain)
    dq = ds @ wide_k * scale
    return Gradients(out, dq.to(dtype), dk, dv, dsinks, dtable)


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


def sinks_share(got: Tensor, want: Tensor, reference: Tensor) -> float:
    """Returns the error of a gradient of sinks (H,), or of a table (H, any), over its budget, as
    ``budget_share``.

    ``want``, ``reference``: of oracle and yardstick, (B, H, S, ...) by row. The errors of rows have
    any sign and may cancel in a sum, so the budget is four times their norm.
    """
    rows = 2 * BUDGET_FACTOR * float((reference.double() - want).norm())
    error = float((got.double() - want.sum((0, 2))).norm())
    share = error / (rows + BUDGET_FLOOR * (float(want.norm()) or 1.0))
    return share if math.isfinite(share) else math.inf
