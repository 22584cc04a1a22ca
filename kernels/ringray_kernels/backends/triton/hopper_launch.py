"""Launches of the warp-specialised kernels. Imported on demand: Gluon differs between versions of
triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringray_kernels.api import BackwardOperands, Operands, State
from ringray_kernels.backends.triton import hopper
from ringray_kernels.backends.triton.arguments import (
    LEAST_SCALE,
    LOG2_E,
    Launch,
    legal_strides,
)
from ringray_kernels.backends.triton.hopper_dkv import hopper_dkv_kernel
from ringray_kernels.backends.triton.hopper_dq import hopper_dq_kernel
from ringray_kernels.backends.triton.hopper_forward import hopper_forward_kernel
from ringray_kernels.backends.triton.plan import tile_plan
from ringray_kernels.config import BlockConfig


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    """Describes ``x`` (B, H, S, D), 16-bit elements, in blocks of ``rows`` rows of one head."""
    block = [1, 1, rows, x.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)  # the same for fp16
    return TensorDescriptor(x, list(x.shape), legal_strides(x), block, layout)


def _launch(
    kernel: Any,
    config: BlockConfig,
    resident: Tensor,
    bounds: tuple[Tensor, Tensor],
    tiles: list[tuple[Tensor, int]],
    tile: int,
    arguments: tuple[Any, ...],
    sizes: tuple[int, ...],
    **options: Any,
) -> Launch:
    """Returns the launch of a kernel over blocks of 128 rows of ``resident``, which see ``bounds``
    of the streamed rows, in tiles of ``tile``.

    ``tiles``: what is loaded by descriptors, and the rows of each load; ``arguments``, ``sizes``:
    those of the kernel after the bounds, and after the heads."""
    start, end = bounds
    batch, heads, _, head_dim = resident.shape
    plan = tile_plan(start, end, hopper.GROUPS.value * hopper.ROWS.value, tile)
    copies = heads * batch // start.shape[0]  # heads that each block of the plan stands for
    described = [_described(x, rows) for x, rows in tiles]
    bounds = start.contiguous(), end.contiguous()
    return Launch(
        kernel,
        ((plan.shape[0] - 1) * copies, 1, 1),
        (*described, plan, *bounds, *arguments, copies, heads, *sizes),
        {
            "D": head_dim,
            **options,
            "STAGES": config.stages,
            "num_warps": config.warps // hopper.GROUPS.value,
            "enable_fp_fusion": True,
        },
    )


def forward(operands: Operands, result: State, state: State | None, config: BlockConfig) -> Launch:
    """Returns the launch of forward with a copying warp; see hopper_forward_kernel."""
    q, k, v, start, end, scale, *_ = operands
    if scale < 0:  # masked scores are -inf before the scale
        q, scale = -q, -scale
    return _launch(
        hopper_forward_kernel,
        config,
        q,
        (start, end),
        [(q, hopper.ROWS.value), (k, config.block_n), (v, config.block_n)],
        config.block_n,
        (*result, *(state or result), max(scale, LEAST_SCALE) * LOG2_E),
        (q.shape[2], q.shape[1] // k.shape[1]),
        BLOCK_N=config.block_n,
        HAS_STATE=state is not None,
        IN_PLACE=state is not None and state.out is result.out,
    )


def dkv(
    operands: Operands, tensors: BackwardOperands, first: Tensor, stop: Tensor, config: BlockConfig
) -> Launch:
    """Returns the launch that adds to ``dk`` and ``dv``, of contiguous rows; see
    hopper_dkv_kernel."""
    q, k, v, _, _, scale, *_ = operands
    dout, _, lse, delta, _, dk, dv = tensors
    resident, streamed = hopper.ROWS.value, config.block_m
    strides = *dk.stride()[:3], *dv.stride()[:3]
    return _launch(
        hopper_dkv_kernel,
        config,
        k,
        (first, stop),
        [(q, streamed), (dout, streamed), (k, resident), (v, resident)],
        config.block_m,
        (lse, delta, dk, dv, float(scale), scale * LOG2_E, *strides),
        (q.shape[2], k.shape[2], q.shape[1] // k.shape[1]),
        BLOCK_M=config.block_m,
    )


def dq(operands: Operands, tensors: BackwardOperands, config: BlockConfig) -> Launch:
    """Returns the launch that adds to ``dq``, contiguous; see hopper_dq_kernel."""
    q, k, v, start, end, scale, *_ = operands
    dout, _, lse, delta, dq, _, _ = tensors
    resident, streamed = hopper.ROWS.value, config.block_n
    return _launch(
        hopper_dq_kernel,
        config,
        q,
        (start, end),
        [(q, resident), (dout, resident), (k, streamed), (v, streamed)],
        config.block_n,
        (lse, delta, dq, float(scale), scale * LOG2_E),
        (q.shape[2], q.shape[1] // k.shape[1]),
        BLOCK_N=config.block_n,
    )
