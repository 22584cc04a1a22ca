"""Launches of the warp-specialised kernels. Imported on demand: Gluon differs between versions of
triton."""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringray_kernels.api import BackwardOperands, Operands, State
from ringray_kernels.backends.triton import hopper
from ringray_kernels.backends.triton.arguments import (
    LEAST_SCALE,
    LOG2_E,
    Launch,
    bounds_of,
    legal_strides,
)
from ringray_kernels.backends.triton.hopper_backward import hopper_dkv_kernel
from ringray_kernels.config import BlockConfig


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    """Describes ``x`` (B, H, S, D), 16-bit elements, in blocks of ``rows`` rows of one head."""
    block = [1, 1, rows, x.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)  # the same for fp16
    return TensorDescriptor(x, list(x.shape), legal_strides(x), block, layout)


def forward(operands: Operands, result: State, state: State | None, config: BlockConfig) -> Launch:
    """Returns the launch of forward with a copying warp; see hopper_forward_kernel."""
    q, k, v, start, end, scale, *_ = operands
    if scale < 0:
        q, scale = -q, -scale
    (start, stride_bounds), (end, _) = bounds_of(start), bounds_of(end)
    return Launch(
        hopper.hopper_forward_kernel,
        (triton.cdiv(q.shape[2], config.block_m), q.shape[1], q.shape[0]),
        (
            _described(q, hopper.GROUP_ROWS),
            _described(k, config.block_n),
            _described(v, config.block_n),
            start, end, *result, *(state or result),
            max(scale, LEAST_SCALE) * LOG2_E,
            stride_bounds, q.shape[2], q.shape[1] // k.shape[1],
        ),
        {
            "D": q.shape[3],
            "BLOCK_N": config.block_n,
            "STAGES": config.stages,
            "HAS_STATE": state is not None,
            "IN_PLACE": state is not None and state.out is result.out,
            "num_warps": config.warps // hopper.GROUPS,
            "enable_fp_fusion": True,
        },
    )  # fmt: skip


def dkv(
    operands: Operands, given: BackwardOperands, first: Tensor, stop: Tensor, config: BlockConfig
) -> Launch:
    """Returns the launch that adds to ``dk`` and ``dv``, of contiguous rows; see
    hopper_dkv_kernel."""
    q, k, v, _, _, scale, *_ = operands
    dout, _, lse, delta, _, dk, dv = given
    (first, stride_bounds), (stop, _) = bounds_of(first), bounds_of(stop)
    batch, kv_heads, keys, head_dim = k.shape
    return Launch(
        hopper_dkv_kernel,
        (triton.cdiv(keys, config.block_n), kv_heads, batch),
        (
            _described(q, config.block_m),
            _described(dout, config.block_m),
            _described(k, hopper.GROUP_ROWS),
            _described(v, hopper.GROUP_ROWS),
            first, stop, lse, delta, dk, dv, float(scale), scale * LOG2_E, *dk.stride()[:3],
            *dv.stride()[:3], stride_bounds, q.shape[2], keys, q.shape[1] // kv_heads,
        ),
        {
            "D": head_dim,
            "BLOCK_M": config.block_m,
            "STAGES": config.stages,
            "num_warps": config.warps // hopper.GROUPS,
            "enable_fp_fusion": True,
        },
    )  # fmt: skip
