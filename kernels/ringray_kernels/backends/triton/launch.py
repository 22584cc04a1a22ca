"""Launches: from tensors to a kernel's arguments, with the configuration checked before.

``forward_launch``, ``dq_launch``, ``dkv_launches`` say what would run, as data; ``run`` runs it,
and ``ringray_kernels.bench --compile-only`` compiles the same thing for a GPU that is not there.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ringray_kernels.backends.triton.backward import delta_kernel, dkv_kernel, dq_kernel
from ringray_kernels.backends.triton.defaults import default
from ringray_kernels.backends.triton.forward import forward_kernel
from ringray_kernels.config import (
    BlockConfig,
    Blocks,
    Kernel,
    Problem,
    Target,
    head_dim_parts,
    supports,
)

if TYPE_CHECKING:
    from ringray_kernels.api import State

INTERPRETED = bool(triton.knobs.runtime.interpret)
# The interpreter runs everything; it is asked for the tiles of a real GPU, which tests edges best.
_INTERPRETER_TARGET = "sm_90"
_LOG2_E = math.log2(math.e)
# A scale of zero would make 0 * inf of a masked score; this one makes all scores equal as well.
_LEAST_SCALE = 1e-30
_DELTA_ROWS = 64


@dataclass(frozen=True)
class Launch:
    """One kernel launch: ``kernel[grid](*arguments, **options)``."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def architecture(device: torch.device) -> str:
    """The name of ``device``'s architecture, as in ``config.TARGETS``."""
    if device.type == "cpu":
        return _INTERPRETER_TARGET
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def configured(given: BlockConfig | None, problem: Problem, target: Target) -> BlockConfig:
    """``given`` if it fits, or the default.

    Raises:
        ValueError: ``given`` cannot compute the problem on the target.
    """
    if given is None:
        return default(problem, target)
    reason = supports(given, problem, target)
    if reason:
        raise ValueError(f"{problem.kernel} config {given}: {reason}")
    return given


def run(launch: Launch, device: torch.device) -> None:
    """Runs ``launch`` on ``device``."""
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        launch.kernel[launch.grid](*launch.arguments, **launch.options)


def _streamable(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can describe them."""
    for x in tensors:
        if x.stride(-1) != 1 or x.data_ptr() % 16:
            return False
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if size > 1 and (stride <= 0 or stride * x.element_size() % 16):
                return False
    return True


def _legal_strides(x: Tensor) -> list[int]:
    """The strides of ``x``; of a dimension of size 1 any that a descriptor takes will do."""
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return [stride if size > 1 else x.shape[-1] * 8 for size, stride in outer] + [1]


def _described(x: Tensor, rows: int) -> TensorDescriptor:
    """``x`` (B, H, S, D) in blocks of ``rows`` rows of one head."""
    width, _ = head_dim_parts(x.shape[-1])
    return TensorDescriptor(x, list(x.shape), _legal_strides(x), [1, 1, rows, width])


def _problem(kernel: Kernel, q: Tensor, k: Tensor, *streamed: Tensor) -> Problem:
    return Problem(
        kernel, q.shape[3], q.element_size(), q.shape[1] // k.shape[1], _streamable(*streamed)
    )


def _bounds(x: Tensor) -> tuple[Tensor, int]:
    """An interval bound (B or 1, rows), and its stride from one batch entry to the next."""
    x = x.contiguous()
    return x, 0 if x.shape[0] == 1 else x.shape[1]


def _options(
    config: BlockConfig, q: Tensor, target: Target, dtype: torch.dtype, *, packs: bool = True
) -> dict[str, Any]:
    """What all kernels take. fp32 products take three tf32 ones on NVIDIA: nearly fp32's precision
    at a multiple of its speed. ``dtype`` is the problem's, of which the interpreter gets a wider
    copy."""
    first, rest = head_dim_parts(q.shape[3])
    return {
        "HEAD_DIM": q.shape[3],
        "D0": first,
        "D1": rest,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        **({"PACK": config.pack} if packs else {}),
        "DESCRIPTORS": config.path == "descriptors",
        "PRECISION": "tf32x3" if dtype == torch.float32 and not target.is_amd else "ieee",
        "EMULATE_BF16": dtype == torch.bfloat16 and q.dtype == torch.float32,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": True,
    }


def forward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    out: Tensor,
    lse: Tensor,
    state: State | None,
    scale: float,
    blocks: Blocks,
    target: Target,
    dtype: torch.dtype,
) -> Launch:
    """Forward into ``out`` and ``lse``, both contiguous, as are the state's; see forward_kernel."""
    problem = _problem("forward", q, k, q, k, v)
    config = configured(blocks.forward, problem, target)
    if config.path == "specialised" and not INTERPRETED:
        return _specialised(q, k, v, start, end, out, lse, state, scale, config)
    described = config.path == "descriptors"
    (start, stride_bounds), (end, _) = _bounds(start), _bounds(end)
    batch, heads, rows, _ = q.shape
    earlier_out, earlier_lse = state or (out, lse)
    return Launch(
        forward_kernel,
        (triton.cdiv(rows, config.block_m // config.pack), heads // config.pack, batch),
        (
            q,
            _described(k, config.block_n) if described else k,
            _described(v, config.block_n) if described else v,
            start, end, out, lse, earlier_out, earlier_lse,
            max(abs(scale), _LEAST_SCALE) * _LOG2_E,
            *q.stride(), *k.stride(), *v.stride(),
            stride_bounds, rows, problem.group,
        ),
        {
            **_options(config, q, target, dtype),
            "HAS_STATE": state is not None,
            "IN_PLACE": state is not None and state.out is out,
            "NEGATE": scale < 0,
        },
    )  # fmt: skip


def _specialised(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    out: Tensor,
    lse: Tensor,
    state: State | None,
    scale: float,
    config: BlockConfig,
) -> Launch:
    """Forward with a warp that copies; see hopper_forward_kernel."""
    from ringray_kernels.backends.triton import hopper

    if scale < 0:
        q, scale = -q, -scale
    (start, stride_bounds), (end, _) = _bounds(start), _bounds(end)
    earlier_out, earlier_lse = state or (out, lse)
    return Launch(
        hopper.hopper_forward_kernel,
        (triton.cdiv(q.shape[2], config.block_m), q.shape[1], q.shape[0]),
        (
            hopper.described(q, hopper.GROUP_ROWS, _legal_strides(q)),
            hopper.described(k, config.block_n, _legal_strides(k)),
            hopper.described(v, config.block_n, _legal_strides(v)),
            start, end, out, lse, earlier_out, earlier_lse,
            max(scale, _LEAST_SCALE) * _LOG2_E,
            stride_bounds, q.shape[2], q.shape[1] // k.shape[1],
        ),
        {
            "D": q.shape[3],
            "BLOCK_N": config.block_n,
            "STAGES": config.stages,
            "HAS_STATE": state is not None,
            "IN_PLACE": state is not None and state.out is out,
            "num_warps": config.warps // hopper.GROUPS,
            "enable_fp_fusion": True,
        },
    )  # fmt: skip


def dq_launch(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    start: Tensor,
    end: Tensor,
    dq: Tensor,
    scale: float,
    blocks: Blocks,
    target: Target,
    dtype: torch.dtype,
) -> Launch:
    """dQ added to ``dq``; it, ``lse`` and ``delta`` are contiguous; see dq_kernel."""
    problem = _problem("dq", q, k, k, v)
    config = configured(blocks.dq, problem, target)
    described = config.path == "descriptors"
    (start, stride_bounds), (end, _) = _bounds(start), _bounds(end)
    batch, heads, rows, _ = q.shape
    return Launch(
        dq_kernel,
        (triton.cdiv(rows, config.block_m // config.pack), heads // config.pack, batch),
        (
            dout, q,
            _described(k, config.block_n) if described else k,
            _described(v, config.block_n) if described else v,
            lse, delta, start, end, dq, scale, scale * _LOG2_E,
            *dout.stride(), *q.stride(), *k.stride(), *v.stride(),
            stride_bounds, rows, problem.group,
        ),
        _options(config, q, target, dtype),
    )  # fmt: skip


def dkv_launches(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    first: Tensor,
    stop: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
    blocks: Blocks,
    target: Target,
    dtype: torch.dtype,
) -> list[Launch]:
    """dK and dV added to ``dk`` and ``dv``, whose rows are contiguous; ``first``, ``stop`` (B or 1,
    Sk) are the query rows that see each key row; see dkv_kernel."""
    problem = _problem("dkv", q, k, q, dout)
    config = configured(blocks.dkv, problem, target)
    described = config.path == "descriptors"
    (first, stride_bounds), (stop, _) = _bounds(first), _bounds(stop)
    batch, kv_heads, keys, _ = k.shape
    grid = (triton.cdiv(keys, config.block_n), kv_heads, batch)
    arguments = (
        _described(dout, config.block_m) if described else dout,
        _described(q, config.block_m) if described else q,
        k, v, lse, delta, first, stop, dq, dk, dv, scale, scale * _LOG2_E,
        *dout.stride(), *q.stride(), *k.stride(), *v.stride(), *dk.stride()[:3],
        *dv.stride()[:3], stride_bounds, q.shape[2], keys, problem.group,
    )  # fmt: skip
    options = _options(config, q, target, dtype, packs=False)
    parts = [("DV",), ("DK",)] if config.split else [("DK", "DV")]
    return [
        Launch(
            dkv_kernel,
            grid,
            arguments,
            {
                **options,
                **{name: name in part for name in ("DK", "DV")},
                "ATOMIC_DQ": blocks.atomic_dq and "DK" in part,
            },
        )
        for part in parts
    ]


def delta_launch(dout: Tensor, out: Tensor, lse: Tensor, result: Tensor) -> Launch:
    """rowsum(dout * out) into ``result``; it and ``lse`` are contiguous; see delta_kernel."""
    batch, heads, rows, head_dim = dout.shape
    return Launch(
        delta_kernel,
        (triton.cdiv(rows, _DELTA_ROWS), heads, batch),
        (dout, out, lse, result, *dout.stride(), *out.stride(), rows, heads),
        {"HEAD_DIM": head_dim, "WIDTH": triton.next_power_of_2(head_dim), "BLOCK": _DELTA_ROWS},
    )
