"""cuDNN's attention, by PyTorch's operators, on the dense pieces that cover the intervals.

Masked pieces, and backward passes in fp32 (``aten.backward`` without an output), are left to
``fused.py``. Shared heads are cuDNN's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringray_kernels.api import PLAIN, BackwardOperands, Features, Operands, State
from ringray_kernels.backends import aten
from ringray_kernels.backends.piece import Piece
from ringray_kernels.checks import TensorKind

MAX_HEAD_DIM = 128  # elements; forward alone could take more
HEAD_DIM_ALIGNMENT = 8  # elements
_HALF = (torch.bfloat16, torch.float16)
_ops = torch.ops.aten

delta = aten.delta


def unsupported(q: TensorKind, asked: Features = PLAIN) -> str | None:
    """Returns why cuDNN does not compute ``asked`` on tensors like ``q``, or None."""
    if q.device.type != "cuda" or torch.version.cuda is None:
        return f"got tensors on {q.device.type}, expected an NVIDIA GPU"
    if not torch.backends.cudnn.is_available():
        return "PyTorch has no cuDNN here"
    return limits(q, asked)


def limits(q: TensorKind, asked: Features) -> str | None:
    """Returns why vendors' kernels do not compute ``asked`` at the dtype and head dim of ``q``."""
    if q.dtype not in _HALF:
        return f"got {q.dtype}, expected bfloat16 or float16"
    if asked.softcap is not None:
        return f"got softcap {asked.softcap}, expected None"
    if asked.biased:
        return "got a bias of scores, expected none"
    if asked.dropout:
        return "got dropout, expected none: its own would differ from ring to ring"
    if asked.quantized:
        return "got q, k and v in e4m3, expected 16 bits"
    widest = max(q.shape[-1], asked.value_dim or 0)
    if widest > MAX_HEAD_DIM or widest % HEAD_DIM_ALIGNMENT:
        return (
            f"got head dim {widest}, expected a multiple of {HEAD_DIM_ALIGNMENT} up to "
            f"{MAX_HEAD_DIM}"
        )
    return None


def unshared(x: Tensor) -> Tensor:
    """Returns K/V heads (E, 1, S, D) of a view that shares them (E, G, S, D)."""
    return x[:, 0].unsqueeze(1) if x.stride(1) == 0 else x  # with a stride that kernels take


class _Kernels:
    """See ``aten.FusedCalls``."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _ops._scaled_dot_product_cudnn_attention(
            q, unshared(k), unshared(v), None, True, 0.0, piece.causal, False, scale=piece.scale
        )
        return out, lse.reshape(q.shape[:3])  # (B, H, S) or (B, H, S, 1), by the version

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        saved = dout, q, unshared(k), unshared(v), out, lse.unsqueeze(-1).contiguous()
        no_seed = torch.zeros((), dtype=torch.int64, device=q.device)  # dropout is 0
        bias = query_lengths = key_lengths = None  # an undefined tensor: there is none
        lengths = query_lengths, key_lengths, q.shape[2], k.shape[2]
        grads: tuple[Tensor, Tensor, Tensor] = _ops._scaled_dot_product_cudnn_attention_backward(
            *saved, no_seed, no_seed, bias, *lengths, 0.0, piece.causal, scale=piece.scale
        )
        return grads


_kernels = _Kernels()


def forward(operands: Operands, state: State | None, out_dtype: torch.dtype) -> State:
    """Computes one hop and merges it into ``state``; see ``ringray_kernels.api.forward``."""
    return aten.forward(operands, state, out_dtype, _kernels)


def backward(operands: Operands, tensors: BackwardOperands) -> None:
    """Adds the gradients of one hop in place; see ``ringray_kernels.api.backward``."""
    aten.backward(operands, tensors, _kernels)
