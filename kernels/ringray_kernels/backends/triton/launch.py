"""Launches: a checked configuration and the arguments of a kernel, from tensors.

``forward_launch``, ``dq_launch`` and ``dkv_launches`` return launches as data. ``run`` runs one;
``ringray_kernels.inspect`` compiles the same launch for a GPU that need not be present.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ringray_kernels.api import BackwardOperands, Operands, State
from ringray_kernels.backends.triton.arguments import (
    INTERPRETED,
    LEAST_SCALE,
    LOG2_E,
    Launch,
    bounds_of,
    configured,
    inside_cap,
    legal_strides,
    problem_of,
)
from ringray_kernels.backends.triton.backward import delta_kernel, dkv_kernel
from ringray_kernels.backends.triton.dq import dq_kernel
from ringray_kernels.backends.triton.forward import forward_kernel
from ringray_kernels.config import BlockConfig, Target, head_dim_parts

if not INTERPRETED:
    # Before triton 3.8 a kernel's key in the cache depends on which ones were hashed before it.
    _ = [x.cache_key for x in (forward_kernel, delta_kernel, dkv_kernel, dq_kernel)]

_DELTA_ROWS = 64
_NARROW = 64  # head dims at which one more tile of scores fits into registers


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    """Describes ``x`` (B, H, S, D) in blocks of ``rows`` rows of one head."""
    width, _ = head_dim_parts(x.shape[-1], x.itemsize)
    return TensorDescriptor(x, list(x.shape), legal_strides(x), [1, 1, rows, width])


def _turned(v: Tensor, rows: int) -> TensorDescriptor:
    """Describes a copy of ``v`` (B, H, S, D) as (B, H, D, S), in blocks of ``rows`` rows of one
    head: products in e4m3 sum over neighbours in memory."""
    batch, heads, size, dim = v.shape
    copy = v.new_empty((batch, heads, dim, triton.cdiv(size, 16) * 16))[..., :size]
    copy.copy_(v.mT)
    width, _ = head_dim_parts(dim, v.itemsize)
    return TensorDescriptor(copy, list(copy.shape), list(copy.stride()), [1, 1, width, rows])


def _streamed(x: Tensor, rows: int, config: BlockConfig) -> Tensor | TensorDescriptor:
    """Returns ``x`` as a kernel takes what it streams in tiles of ``rows``."""
    return x if config.path == "pointers" else _described(x, rows)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()]


def _options(
    config: BlockConfig, operands: Operands, target: Target, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the options of all kernels. On NVIDIA three tf32 products replace one of fp32: nearly
    its precision at a multiple of its speed. ``dtype`` is the problem's; the interpreter may get a
    wider copy of ``q``."""
    q, v = operands.q, operands.v
    (first, rest), (value_first, value_rest) = (
        head_dim_parts(x.shape[3], x.itemsize) for x in (q, v)
    )
    return {
        "HEAD_DIM": q.shape[3],
        "D0": first,
        "D1": rest,
        "VALUE_DIM": v.shape[3],
        "V0": value_first,
        "V1": value_rest,
        "SOFTCAP": operands.softcap is not None,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "DESCRIPTORS": config.path != "pointers",
        "PRECISION": "tf32x3" if dtype == torch.float32 and not target.is_amd else "ieee",
        "EMULATE_BF16": dtype == torch.bfloat16 and q.dtype == torch.float32,
        **_dropped(operands),
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": True,
    }


def _dropped(operands: Operands) -> dict[str, Any]:
    """Returns the arguments of kernels that drop weights; none without dropout."""
    dropout, positions = operands.dropout, operands.at
    if dropout is None or positions is None:
        return {}
    # As signed numbers: an argument of 2^31 or more would be of another type, and recompile.
    low, high = (word - (word >> 31 << 32) for word in dropout.words)
    return {
        "rows_at": positions.rows,
        "keys_at": positions.keys,
        "seed_low": low,
        "seed_high": high,
        "heads_before": dropout.head,
        "least": dropout.least,
        "amplify": 1 / (1 - dropout.p),
    }


def _outside(operands: Operands) -> float:
    """Returns the factor of forward on q.k, or on tanh: positive, but with scales, which may take
    any."""
    if operands.softcap is not None:
        return operands.softcap
    return operands.scale if operands.scales else max(abs(operands.scale), LEAST_SCALE)


def _scales(operands: Operands) -> dict[str, Any]:
    """Returns the arguments of forward on operands in e4m3; none on others."""
    if operands.scales is None:
        return {}
    names = ("query_scales", "key_scales", "value_scales")
    of_rows = {name: x.contiguous() for name, x in zip(names, operands.scales, strict=True)}
    return {**of_rows, "key_rows": operands.k.shape[2], "EMULATE_FP8": INTERPRETED}


def forward_launch(
    operands: Operands, result: State, state: State | None, target: Target, dtype: torch.dtype
) -> Launch:
    """Returns the launch of forward into ``result``, contiguous as the state's tensors; see
    forward_kernel."""
    q, k, v, start, end, scale, blocks, softcap, bias, *_ = operands
    problem = problem_of("forward", operands, dtype, q, k, v)
    config = configured(blocks.forward, problem, target)
    if config.path == "specialised" and not INTERPRETED:
        from ringray_kernels.backends.triton import hopper_launch

        return hopper_launch.forward(operands, result, state, config)
    (start, stride_bounds), (end, _) = bounds_of(start), bounds_of(end)
    turned = operands.scales is not None and config.path != "pointers"
    batch, heads, rows, _ = q.shape
    return Launch(
        forward_kernel,
        (triton.cdiv(rows, config.block_m // config.pack), heads // config.pack, batch),
        (
            q,
            _streamed(k, config.block_n, config),
            _turned(v, config.block_n) if turned else _streamed(v, config.block_n, config),
            start,
            end,
            *result,
            *(state or result),
            _outside(operands) * LOG2_E,
            inside_cap(operands),
            bias and bias.arguments(keys_walk=True),
            *_strides(q, k, v),
            stride_bounds,
            rows,
            problem.group,
        ),
        {
            **_options(config, operands, target, dtype),
            "PACK": config.pack,
            "HAS_STATE": state is not None,
            "IN_PLACE": state is not None and state.out is result.out,
            "NEGATE": scale < 0 and softcap is None and operands.scales is None,
            **_scales(operands),
        },
    )


def dq_launch(
    operands: Operands, tensors: BackwardOperands, target: Target, dtype: torch.dtype
) -> Launch:
    """Returns the launch that adds to ``dq``; it, ``lse`` and ``delta`` are contiguous; see
    dq_kernel."""
    q, k, v, start, end, scale, blocks, softcap, bias, *_ = operands
    dout, _, lse, delta, dq, _, _ = tensors
    problem = problem_of("dq", operands, dtype, q, dout, k, v)
    config = configured(blocks.dq, problem, target)
    if bias is not None and bias.grad is not None:
        # A program adds to the gradient of one head.
        config = replace(config, pack=1)
    if config.path == "specialised" and not INTERPRETED:
        from ringray_kernels.backends.triton import hopper_launch

        return hopper_launch.dq(operands, tensors, config)
    (start, stride_bounds), (end, _) = bounds_of(start), bounds_of(end)
    batch, heads, rows, _ = q.shape
    grid = (triton.cdiv(rows, config.block_m // config.pack), heads // config.pack, batch)
    sums = None if bias is None else bias.sums(batch, grid[0])
    return Launch(
        dq_kernel,
        grid,
        (
            dout,
            q,
            _streamed(k, config.block_n, config),
            _streamed(v, config.block_n, config),
            lse,
            delta,
            start,
            end,
            dq,
            float(scale),
            (softcap or scale) * LOG2_E,
            inside_cap(operands),
            bias and bias.arguments(keys_walk=True),
            sums,
            *_strides(dout, q, k, v),
            stride_bounds,
            rows,
            problem.group,
        ),
        {**_options(config, operands, target, dtype), "PACK": config.pack},
        sums,
    )


def dkv_launches(
    operands: Operands,
    tensors: BackwardOperands,
    first: Tensor,
    stop: Tensor,
    target: Target,
    dtype: torch.dtype,
) -> list[Launch]:
    """Returns the launches that add to ``dk`` and ``dv``, of contiguous rows; ``first``, ``stop``
    (B or 1, Sk) are the query rows that see each key row; see dkv_kernel."""
    q, k, v, _, _, scale, blocks, softcap, bias, *_ = operands
    dout, _, lse, delta, _, dk, dv = tensors
    problem = problem_of("dkv", operands, dtype, q, dout, k, v)
    config = configured(blocks.dkv, problem, target)
    (first, stride_bounds), (stop, _) = bounds_of(first), bounds_of(stop)
    batch, kv_heads, keys, _ = k.shape
    if config.path == "specialised" and not INTERPRETED:
        from ringray_kernels.backends.triton import hopper_launch

        return [hopper_launch.dkv(operands, tensors, first, stop, config)]
    grid = (triton.cdiv(keys, config.block_n), kv_heads, batch)
    options = _options(config, operands, target, dtype)
    # On Hopper both products come before p, where registers hold one more tile of scores.
    narrow = problem.width <= _NARROW and problem.itemsize == 2

    def launch(*part: str) -> Launch:
        return Launch(
            dkv_kernel,
            grid,
            (
                _streamed(dout, config.block_m, config),
                _streamed(q, config.block_m, config),
                k,
                v,
                lse,
                delta,
                first,
                stop,
                dk,
                dv,
                float(scale),
                (softcap or scale) * LOG2_E,
                inside_cap(operands),
                bias and bias.arguments(keys_walk=False),
                *_strides(dout, q, k, v),
                *dk.stride()[:3],
                *dv.stride()[:3],
                stride_bounds,
                q.shape[2],
                keys,
                problem.group,
            ),
            {
                **options,
                **{name: name in part for name in ("DK", "DV")},
                "DP_FIRST": target.wgmma and part == ("DK", "DV") and narrow,
            },
        )

    if config.split:  # one after the other, each has the registers of both
        return [launch("DV"), launch("DK")]
    return [launch("DK", "DV")]


def delta_launch(dout: Tensor, out: Tensor, lse: Tensor, result: Tensor) -> Launch:
    """Returns the launch of rowsum(dout * out) into ``result``; it and ``lse`` are contiguous; see
    delta_kernel."""
    batch, heads, rows, head_dim = dout.shape
    return Launch(
        delta_kernel,
        (triton.cdiv(rows, _DELTA_ROWS), heads, batch),
        (dout, out, lse, result, *dout.stride(), *out.stride(), rows, heads),
        {"HEAD_DIM": head_dim, "WIDTH": triton.next_power_of_2(head_dim), "BLOCK": _DELTA_ROWS},
    )
