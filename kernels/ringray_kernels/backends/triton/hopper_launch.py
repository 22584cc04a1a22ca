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


def _blocks(
    start: Tensor, end: Tensor, rows: int, tile: int, batch: int, heads: int
) -> tuple[tuple[int, int, int], Tensor, int]:
    """Returns the grid, the plan, and the heads that each of its blocks stands for."""
    plan = tile_plan(start, end, rows, tile)
    copies = heads * batch // start.shape[0]
    return ((plan.shape[0] - 1) * copies, 1, 1), plan, copies


def _options(config: BlockConfig) -> dict[str, Any]:
    return {
        "STAGES": config.stages,
        "num_warps": config.warps // hopper.GROUPS.value,
        "enable_fp_fusion": True,
    }


def forward(operands: Operands, result: State, state: State | None, config: BlockConfig) -> Launch:
    """Returns the launch of forward with a copying warp; see hopper_forward_kernel."""
    q, k, v, start, end, scale, *_ = operands
    if scale < 0:
        q, scale = -q, -scale
    batch, heads, rows, head_dim = q.shape
    grid, plan, copies = _blocks(start, end, config.block_m, config.block_n, batch, heads)
    return Launch(
        hopper_forward_kernel,
        grid,
        (
            _described(q, hopper.ROWS.value),
            _described(k, config.block_n),
            _described(v, config.block_n),
            plan, start.contiguous(), end.contiguous(), *result, *(state or result),
            max(scale, LEAST_SCALE) * LOG2_E,
            copies, heads, rows, heads // k.shape[1],
        ),
        {
            "D": head_dim,
            "BLOCK_N": config.block_n,
            "HAS_STATE": state is not None,
            "IN_PLACE": state is not None and state.out is result.out,
            **_options(config),
        },
    )  # fmt: skip


def dkv(
    operands: Operands, given: BackwardOperands, first: Tensor, stop: Tensor, config: BlockConfig
) -> Launch:
    """Returns the launch that adds to ``dk`` and ``dv``, of contiguous rows; see
    hopper_dkv_kernel."""
    q, k, v, _, _, scale, *_ = operands
    dout, _, lse, delta, _, dk, dv = given
    batch, kv_heads, keys, head_dim = k.shape
    grid, plan, copies = _blocks(first, stop, config.block_n, config.block_m, batch, kv_heads)
    return Launch(
        hopper_dkv_kernel,
        grid,
        (
            _described(q, config.block_m),
            _described(dout, config.block_m),
            _described(k, hopper.ROWS.value),
            _described(v, hopper.ROWS.value),
            plan, first.contiguous(), stop.contiguous(), lse, delta, dk, dv,
            float(scale), scale * LOG2_E, *dk.stride()[:3], *dv.stride()[:3],
            copies, kv_heads, q.shape[2], keys, q.shape[1] // kv_heads,
        ),
        {"D": head_dim, "BLOCK_M": config.block_m, **_options(config)},
    )  # fmt: skip


def dq(operands: Operands, given: BackwardOperands, config: BlockConfig) -> Launch:
    """Returns the launch that adds to ``dq``, contiguous; see hopper_dq_kernel."""
    q, k, v, start, end, scale, *_ = operands
    dout, _, lse, delta, dq, _, _ = given
    batch, heads, rows, head_dim = q.shape
    grid, plan, copies = _blocks(start, end, config.block_m, config.block_n, batch, heads)
    return Launch(
        hopper_dq_kernel,
        grid,
        (
            _described(q, hopper.ROWS.value),
            _described(dout, hopper.ROWS.value),
            _described(k, config.block_n),
            _described(v, config.block_n),
            plan, start.contiguous(), end.contiguous(), lse, delta, dq,
            float(scale), scale * LOG2_E, copies, heads, rows, heads // k.shape[1],
        ),
        {"D": head_dim, "BLOCK_N": config.block_n, **_options(config)},
    )  # fmt: skip
