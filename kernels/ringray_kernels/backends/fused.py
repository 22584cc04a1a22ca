"""PyTorch's fused attention calls that return lse, behind one pair of functions.

Shapes as in SDPA, equal head counts (shared heads by stride 0) and head dims, which on CUDA are
multiples of ``HEAD_DIM_ALIGNMENT``. Of a piece only causal, mask and scale count.
On CPU the flash kernel computes everything; on CUDA it computes bf16 and fp16 without a mask, and
the memory-efficient kernel the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringray_kernels.backends.piece import Piece

_ops = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_MASK_ALIGNMENT = 16  # elements: the memory-efficient kernel needs aligned rows of its bias
HEAD_DIM_ALIGNMENT = 8  # elements: CUDA's fused kernels take no other head dims
_FLASH_HEAD_DIM = 256  # elements: the most that CUDA's flash kernel takes
# Rows to which NVIDIA's memory-efficient kernel pads lse; AMD's does not.
_LSE_ALIGNMENT = 1 if torch.version.hip else 32


def on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _flash(q: Tensor, mask: Tensor | None) -> bool:
    return mask is None and q.dtype in _HALF and q.shape[-1] <= _FLASH_HEAD_DIM


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Returns the mask as (B, H, Sq, Sk) with shared batch and heads and aligned rows."""
    if mask is None:
        return None
    padding = -mask.shape[-1] % _MASK_ALIGNMENT
    rows = torch.nn.functional.pad(mask, (0, padding))[:, : mask.shape[-1]]
    return rows.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def forward(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
    """Returns out like q and lse, fp32 (B, H, Sq), natural log. Every row must see a key."""
    causal, mask, scale, *_ = piece
    if on_cpu(q):
        out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, lse
    if _flash(q, mask):
        out, lse, *_ = _ops._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    else:
        out, lse, *_ = _ops._scaled_dot_product_efficient_attention(
            q, k, v, _aligned(mask, q, k), True, 0.0, causal, scale=scale
        )
    return out, lse[:, :, : q.shape[2]]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dq, dk, dv in q's dtype, dk and dv per query head. ``lse``, ``out`` may be global."""
    causal, mask, scale, *_ = piece
    grads: tuple[Tensor, Tensor, Tensor]
    if on_cpu(q):
        grads = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
        )
        return grads
    rows = q.shape[2]
    no_seed = torch.zeros((), dtype=torch.uint64, device=q.device)  # dropout is 0: unused
    if _flash(q, mask):
        query_lengths = key_lengths = None  # undefined tensors: others ask for packed sequences
        tensors = dout, q, k, v, out, lse.contiguous()
        lengths = query_lengths, key_lengths, rows, k.shape[2]
        grads = _ops._scaled_dot_product_flash_attention_backward(
            *tensors, *lengths, 0.0, causal, no_seed, no_seed, scale=scale
        )
        return grads
    # In 16 bits the kernel computes delta from rows of ``out`` that are H * D elements apart,
    # whatever its strides.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.nn.functional.pad(lse, (0, -rows % _LSE_ALIGNMENT), value=torch.inf)
    inputs = dout, q, k, v, _aligned(mask, q, k)
    wanted = [True, True, True, False]  # no gradient of the mask
    dq, dk, dv, _ = _ops._scaled_dot_product_efficient_attention_backward(
        *inputs, out, lse, no_seed, no_seed, 0.0, wanted, causal, scale=scale
    )
    return dq, dk, dv
