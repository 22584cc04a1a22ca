"""The oracle: attention by its definition, for any device and dtype, in fp32.

For query row i and key rows j in ``[start_i, end_i)`` (Dao, FlashAttention-2, 2023, with the
interval in place of the causal test)::

    s_ij = cap(scale * q_i . k_j) + b_ij    lse_i = log sum_j exp(s_ij)
    p_ij = exp(s_ij - lse_i)          out_i = sum_j p_ij v_j

    dv_j = sum_i p_ij dout_i          ds_ij = p_ij (dout_i . v_j - delta_i)
    dq_i = scale sum_j ds_ij k_j      dk_j  = scale sum_i ds_ij q_i

where cap(x) = softcap tanh(x / softcap), which gives ds_ij the factor 1 - (s_ij / softcap) ** 2; or
x without a softcap; b_ij is the bias, if there is one. Dropout gives p_ij in out_i and dv_j, and
dout_i . v_j, a factor of its own.

It materialises all scores, so it is for small sizes and for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringray_kernels.api import PLAIN, BackwardOperands, Features, Operands, State
from ringray_kernels.bias import LEAST_LSE
from ringray_kernels.checks import TensorKind
from ringray_kernels.dropout import factors
from ringray_kernels.merge import merge_


def unsupported(q: TensorKind, asked: Features = PLAIN) -> str | None:
    """Returns None: all tensors that pass ``checks.check_qkv`` are supported."""
    return None


def _visible(start: Tensor, end: Tensor, num_keys: int) -> Tensor:
    """Returns the mask of the keys that each row sees, (B or 1, 1, Sq, Sk)."""
    keys = torch.arange(num_keys, dtype=torch.int32, device=start.device)
    return ((keys >= start.unsqueeze(-1)) & (keys < end.unsqueeze(-1))).unsqueeze(1)


def _seen(x: Tensor, visible: Tensor) -> Tensor:
    """Zeroes rows of K or V that no query sees: they may hold NaN, and 0 * NaN is NaN."""
    return x.float().masked_fill(~visible.any(2).unsqueeze(-1), 0.0)


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _scored(products: Tensor, operands: Operands) -> tuple[Tensor, Tensor | float]:
    """Returns scores behind softcap and bias, and their derivative by those before."""
    scores = products * operands.scale
    bias = 0.0 if operands.bias is None else operands.bias.scores()
    if operands.softcap is None:
        return scores + bias, 1.0
    ratio = torch.tanh(scores / operands.softcap)
    return operands.softcap * ratio + bias, 1.0 - ratio**2


def _factors(operands: Operands) -> Tensor | float:
    """Returns the factors of weights by dropout."""
    if operands.dropout is None:
        return 1.0
    assert operands.at is not None, "api checks it"
    batch, heads = (
        torch.arange(size, dtype=torch.int64, device=operands.q.device)
        for size in operands.q.shape[:2]
    )
    return factors(operands.dropout, batch[:, None], heads, *operands.at)


def forward(operands: Operands, state: State | None, out_dtype: torch.dtype) -> State:
    """Computes one hop and merges it into ``state``; see ``ringray_kernels.api.forward``."""
    operands = operands.widened()
    q, k, v, start, end = operands[:5]
    visible = _visible(start, end, k.shape[2])
    k_wide, v_wide = (_per_query_head(_seen(x, visible), q.shape[1]) for x in (k, v))
    scores, _ = _scored(q.float() @ k_wide.transpose(-1, -2), operands)
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    out = (weights * _factors(operands) @ v_wide).masked_fill(~visible.any(-1).unsqueeze(-1), 0.0)
    if state is not None:
        merge_(state.out, state.lse, out, lse)
        out, lse = state
    return State(out.to(out_dtype), lse)


def backward(operands: Operands, tensors: BackwardOperands) -> None:
    """Adds the gradients of one hop in place; see ``ringray_kernels.api.backward``."""
    q, k, v, start, end, scale = operands[:6]
    dout, _, lse, delta, dq, dk, dv = tensors
    visible = _visible(start, end, k.shape[2])
    blind = ~visible.any(-1).unsqueeze(-1)
    k_wide, v_wide = (_per_query_head(_seen(x, visible), q.shape[1]) for x in (k, v))
    q_wide, dout_wide = (x.float().masked_fill(blind, 0.0) for x in (q, dout))
    delta = delta.masked_fill(blind.squeeze(-1), 0.0)
    scores, slope = _scored(q_wide @ k_wide.transpose(-1, -2), operands)
    scores = scores.masked_fill(~visible, -torch.inf)
    p = torch.exp(scores - lse.masked_fill(blind.squeeze(-1), 0.0).clamp(min=LEAST_LSE)[..., None])
    stays = _factors(operands)
    dp = dout_wide @ v_wide.transpose(-1, -2) * stays
    ds = p * (dp - delta.unsqueeze(-1))
    if operands.bias is not None:
        operands.bias.add(ds)
    ds = ds * slope * scale

    def over_group(grad: Tensor, like: Tensor) -> Tensor:
        return grad.unflatten(1, (like.shape[1], -1)).sum(2)

    dq += ds @ k_wide
    dk += over_group(ds.transpose(-1, -2) @ q_wide, dk)
    dv += over_group((p * stays).transpose(-1, -2) @ dout_wide, dv)


def delta(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Returns rowsum(dout * out) in fp32; see ``ringray_kernels.api.delta``."""
    return (dout.float() * out).sum(-1).masked_fill_(lse == -torch.inf, 0.0)
