"""FlashAttention 2, 3 and 4, installed or prebuilt, on the dense pieces that cover the intervals.

Three backends, by the first of their packages that is for the GPU: ``installed`` (FlashAttention 3
on Hopper, else 2), ``version_4`` (the package flash-attn-4) and ``prebuilt`` (what Hugging Face's
package ``kernels`` downloads from the Hub). PyTorch's own copy of 2 is what ``aten`` calls. Masked
pieces, and backward passes in fp32 (``aten.backward`` without an output), are left to ``fused.py``.

Sources: Dao-AILab/flash-attention 0251105 (``flash_attn/cute/interface.py``), its tags
fa4-v4.0.0.beta8 to beta27; huggingface/kernels 0.17.2 and huggingface/kernels-community 40d4194.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringray_kernels.api import PLAIN, BackwardOperands, Features, Operands, State
from ringray_kernels.backends import aten
from ringray_kernels.backends.cudnn import limits, unshared
from ringray_kernels.backends.piece import Piece
from ringray_kernels.checks import TensorKind


class Package(NamedTuple):
    """A build of FlashAttention. ``majors``: of the compute capabilities on which its backward pass
    is there and bitwise repeatable. ``module``: with its functions, in the kernel ``repository`` of
    the Hub at ``release`` unless that is None."""

    version: int
    majors: tuple[int, ...]
    module: str
    repository: str | None = None
    release: int | None = None

    @property
    def name(self) -> str:
        return self.repository or self.module


_SINCE_AMPERE = (8, 9, 10, 11, 12)
# Version 4 computes on Ampere forward only, and its backward pass on 12 is not repeatable.
_OF_4 = (9, 10, 11)
_HUB = "kernels-community/flash-attn"
# Arguments that version 2 has no defaults for.
_UNUSED: dict[str, Any] = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


class Flash:
    """A backend (``api.Backend``) by the first of ``packages`` that is there for a GPU."""

    delta = staticmethod(aten.delta)

    def __init__(self, missing: str, *packages: Package) -> None:
        self._missing, self._packages = missing, packages

    def unsupported(self, q: TensorKind, asked: Features = PLAIN) -> str | None:
        """Returns why FlashAttention does not compute ``asked`` on tensors like ``q``, or None."""
        if q.device.type != "cuda":
            return f"got tensors on {q.device.type}, expected a GPU"
        if limit := limits(q, asked):
            return limit
        # Loaded here, where all ranks learn the reason, and not between two messages.
        package = self._package(q)
        loaded = self._missing if package is None else _loaded(package)
        return loaded if isinstance(loaded, str) else None

    def _package(self, q: TensorKind) -> Package | None:
        major, _ = torch.cuda.get_device_capability(q.device)
        fit = (package for package in self._packages if major in package.majors)
        return next((package for package in fit if _loaded(package) is not None), None)

    def _kernels(self, q: Tensor) -> Kernels:
        package = self._package(q)
        assert package is not None, "unsupported() was asked"
        return Kernels(_loaded(package), package.version)

    def forward(self, operands: Operands, state: State | None, out_dtype: torch.dtype) -> State:
        """Computes one hop and merges it into ``state``; see ``ringray_kernels.api.forward``."""
        return aten.forward(operands, state, out_dtype, self._kernels(operands.q))

    def backward(self, operands: Operands, tensors: BackwardOperands) -> None:
        """Adds the gradients of one hop in place; see ``ringray_kernels.api.backward``."""
        aten.backward(operands, tensors, self._kernels(operands.q))


class Kernels:
    """``aten.FusedCalls`` of a ``module`` of FlashAttention; its tensors are (B, S, H, D)."""

    def __init__(self, module: Any, version: int) -> None:
        self._module, self._version = module, version

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"softmax_scale": piece.scale, "causal": piece.causal}
        rows_first = (x.transpose(1, 2) for x in (q, unshared(k), unshared(v)))
        if self._version == 4:
            call, options["return_lse"] = self._module._flash_attn_fwd, True
        else:
            call = self._module._flash_attn_forward
        if self._version == 2:
            options |= {"dropout_p": 0.0, "return_softmax": False} | _UNUSED
        out, lse, *_ = call(*rows_first, **options)
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Piece
    ) -> tuple[Tensor, Tensor, Tensor]:
        options: dict[str, Any] = {"softmax_scale": piece.scale, "deterministic": True}
        options["is_causal" if self._version == 3 else "causal"] = piece.causal
        if self._version == 2:
            options |= {"dropout_p": 0.0} | _UNUSED
        rows_first = [x.transpose(1, 2) for x in (dout, q, unshared(k), unshared(v), out)]
        lse = lse.contiguous()
        if self._version == 4:  # which makes its results
            dout, *inputs = rows_first
            dq, dk, dv, *_ = self._module._flash_attn_bwd(*inputs, dout, lse, **options)
        else:
            dq, dk, dv = (
                torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in rows_first[1:4]
            )
            self._module._flash_attn_backward(*rows_first, lse, dq=dq, dk=dk, dv=dv, **options)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@cache
def _loaded(package: Package) -> Any:
    """Returns the module of a package, None if it is not installed, or the reason why it cannot be
    loaded; downloads it once."""
    needed = "kernels" if package.repository else package.module
    try:
        module: Any = importlib.import_module(needed)
        if package.repository is None:
            return module
        kernel = module.get_kernel(package.repository, version=package.release)
        return getattr(kernel, package.module)
    except Exception as error:  # of the network, of a build for another GPU, CUDA or PyTorch
        # Version 4 alone leaves a folder flash_attn that is not version 2.
        if isinstance(error, ModuleNotFoundError) and f"{needed}.".startswith(f"{error.name}."):
            return None
        return f"{package.name} cannot be loaded ({type(error).__name__}: {str(error)[:200]})"


installed = Flash(
    "the package flash-attn is not installed; aten calls PyTorch's copy of its kernels",
    Package(3, (9,), "flash_attn_interface"),
    Package(2, _SINCE_AMPERE, "flash_attn.flash_attn_interface"),
)
version_4 = Flash(
    "expected the package flash-attn-4, on a GPU of compute capability 9 to 11",
    Package(4, _OF_4, "flash_attn.cute.interface"),
)
prebuilt = Flash(
    "expected the package kernels, which downloads them, and compute capability 8 or more",
    Package(3, (9,), "flash_attn_interface", f"{_HUB}3", 1),
    Package(4, _OF_4, "interface", f"{_HUB}4", 0),
    Package(2, _SINCE_AMPERE, "flash_attn_interface", f"{_HUB}2", 4),
)
