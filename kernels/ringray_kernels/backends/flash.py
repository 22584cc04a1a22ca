"""FlashAttention of the packages flash-attn, on the dense pieces that cover the intervals.

FlashAttention 3 (``flash_attn_interface``) where it is installed, on Hopper, else 2
(``flash_attn``). PyTorch's own copy of 2 is what ``aten`` calls. Masked pieces, and backward passes
in fp32 (``aten.backward`` without an output), are left to ``fused.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ringray_kernels.api import PLAIN, BackwardOperands, Features, Operands, State
from ringray_kernels.backends import aten
from ringray_kernels.backends.cudnn import limits, unshared
from ringray_kernels.backends.piece import Piece
from ringray_kernels.checks import TensorKind

_VERSION_3 = "flash_attn_interface"
_VERSION_2 = "flash_attn.flash_attn_interface"
_HOPPER = (9, 0)

delta = aten.delta


def unsupported(q: TensorKind, asked: Features = PLAIN) -> str | None:
    """Returns why FlashAttention does not compute ``asked`` on tensors like ``q``, or None."""
    if q.device.type != "cuda":
        return f"got tensors on {q.device.type}, expected a GPU"
    if _name(torch.cuda.get_device_capability(q.device)) is None:
        return "the package flash-attn is not installed; aten calls PyTorch's copy of its kernels"
    return limits(q, asked)


def _name(capability: tuple[int, int]) -> str | None:
    """Returns the module to call on a GPU of that compute capability, None if none is there."""
    if capability == _HOPPER and importlib.util.find_spec(_VERSION_3):
        return _VERSION_3
    return _VERSION_2 if importlib.util.find_spec(_VERSION_2.partition(".")[0]) else None


@cache
def _package(capability: tuple[int, int]) -> tuple[Any, bool]:
    """Returns the module, and whether it is version 3."""
    name = _name(capability)
    assert name is not None, "unsupported() was asked"
    return importlib.import_module(name), name == _VERSION_3


class Kernels:
    """``aten.FusedCalls`` of a ``package``; its tensors are (B, S, H, D)."""

    def __init__(self, package: Any, *, version_3: bool) -> None:
        self._package, self._version_3 = package, version_3

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"softmax_scale": piece.scale, "causal": piece.causal}
        if not self._version_3:
            options |= {"dropout_p": 0.0, "return_softmax": False} | self._unused
        rows_first = (x.transpose(1, 2) for x in (q, unshared(k), unshared(v)))
        out, lse, *_ = self._package._flash_attn_forward(*rows_first, **options)
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        options: dict[str, Any] = {"softmax_scale": piece.scale, "deterministic": True}
        if self._version_3:
            options |= {"is_causal": piece.causal}
        else:
            options |= {"causal": piece.causal, "dropout_p": 0.0} | self._unused
        rows_first = [x.transpose(1, 2) for x in (dout, q, unshared(k), unshared(v), out)]
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in rows_first[1:4])
        self._package._flash_attn_backward(
            *rows_first, lse.contiguous(), dq=dq, dk=dk, dv=dv, **options
        )
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)

    @property
    def _unused(self) -> dict[str, Any]:
        """Returns arguments that version 2 has no defaults for."""
        unlimited = {"window_size_left": -1, "window_size_right": -1}
        return unlimited | {"softcap": 0.0, "alibi_slopes": None}


def _kernels(q: Tensor) -> Kernels:
    package, version_3 = _package(torch.cuda.get_device_capability(q.device))
    return Kernels(package, version_3=version_3)


def forward(operands: Operands, state: State | None, out_dtype: torch.dtype) -> State:
    """Computes one hop and merges it into ``state``; see ``ringray_kernels.api.forward``."""
    return aten.forward(operands, state, out_dtype, _kernels(operands.q))


def backward(operands: Operands, tensors: BackwardOperands) -> None:
    """Adds the gradients of one hop in place; see ``ringray_kernels.api.backward``."""
    aten.backward(operands, tensors, _kernels(operands.q))
