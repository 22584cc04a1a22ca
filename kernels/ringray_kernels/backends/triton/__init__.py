"""Triton kernels for CUDA and ROCm; on a CPU in Triton's interpreter (``TRITON_INTERPRET=1``).

``forward.py`` and ``backward.py`` hold the kernels, ``tiles.py`` what they share, ``launch.py`` the
launches. docs/kernels.md says how they work and what was tried.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringray_kernels.api import State
from ringray_kernels.backends.triton import launch
from ringray_kernels.config import Blocks, target_named

BLOCKS = Blocks
INTERPRETED = launch.INTERPRETED


def unsupported(q: Tensor) -> str | None:
    """Why these kernels cannot compute on tensors like ``q``, or None if they can."""
    if q.device.type == "cpu":
        return None if INTERPRETED else "a CPU needs TRITON_INTERPRET=1 set before the import"
    if q.device.type != "cuda":
        return f"got device {q.device.type!r}, expected 'cuda'"
    try:
        target_named(launch.architecture(q.device))
    except ValueError as error:
        return str(error)
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    scale: float,
    state: State | None,
    out_dtype: torch.dtype | None,
    blocks: Blocks | None = None,
) -> State:
    """Attention over the intervals, merged into ``state``; see ``ringray_kernels.api.forward``."""
    return launch.forward(
        q, k, v, start, end, scale, state, out_dtype or torch.float32, blocks or Blocks()
    )


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    start: Tensor,
    end: Tensor,
    *,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    blocks: Blocks | None = None,
) -> None:
    """Gradients of one hop, added in place; see ``ringray_kernels.api.backward``."""
    launch.backward(dout, q, k, v, lse, delta, start, end, scale, dq, dk, dv, blocks or Blocks())


def delta(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """rowsum(dout * out) in fp32; see ``ringray_kernels.api.delta``."""
    return launch.delta(dout, out, lse)
