"""Shared parts of launches: the launch as data, its configuration, arguments from tensors."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ringray_kernels.api import Operands
from ringray_kernels.checks import LARGEST_SCALE
from ringray_kernels.config import BlockConfig, Kernel, Problem, Target, supports
from ringray_kernels.defaults import default

INTERPRETED = bool(triton.knobs.runtime.interpret)
# The interpreter runs any tiles; those of a real GPU test edges best.
_INTERPRETER_TARGET = "sm_90"
LOG2_E = math.log2(math.e)
# A scale of zero would turn a masked score into 0 * inf; this one also makes all scores equal.
LEAST_SCALE = 1e-30
# CUDA's limit on the second and third dimension of a grid.
_GRID_LIMIT = 65535
_PROGRAM_LIMIT = 1 << 31


@dataclass(frozen=True)
class Launch:
    """One kernel launch: ``kernel[grid](*arguments, **options)``. The grid is blocks of rows, heads
    (or blocks of them), batch. ``sums``: of gradients of the bias, see ``Bias.sums``.

    Raises:
        ValueError: more heads, a larger batch or more programs than a grid holds.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    sums: Tensor | None = None

    def __post_init__(self) -> None:
        for name, size in zip(("heads", "batch"), self.grid[1:], strict=True):
            if size > _GRID_LIMIT:
                raise ValueError(f"{name}: got {size}, expected at most {_GRID_LIMIT} in one call")
        if (programs := math.prod(self.grid)) >= _PROGRAM_LIMIT:  # triton launches none, silently
            raise ValueError(f"got {programs} blocks of rows, expected fewer than 2^31 in one call")


def architecture(device: torch.device) -> str:
    """Returns the name of ``device``'s architecture, as in ``config.TARGETS``; for tensors without
    memory that of the active driver."""
    if device.type == "cpu":
        return _INTERPRETER_TARGET
    if device.type == "meta":
        target = triton.runtime.driver.active.get_current_target()
        return target.arch if target.backend == "hip" else f"sm_{target.arch}"
    if torch.version.hip:
        name: str = torch.cuda.get_device_properties(device).gcnArchName
        return name.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def configured(config: BlockConfig | None, problem: Problem, target: Target) -> BlockConfig:
    """Returns ``config`` if it fits, or the default for None.

    Raises:
        ValueError: ``config`` cannot compute the problem on the target.
    """
    if config is None:
        return default(problem, target)
    reason = supports(config, problem, target)
    if reason:
        raise ValueError(f"{problem.kernel} config {config}: {reason}")
    return config


def run(launch: Launch, device: torch.device) -> None:
    """Runs ``launch`` on ``device``; on tensors without memory it only compiles, for a GPU that is
    there the launcher too."""
    if device.type == "meta":
        made = compile_launch(launch)
        _ = torch.cuda.is_available() and made.run
        return
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device:
        launch.kernel[launch.grid](*launch.arguments, **launch.options)


def compile_launch(launch: Launch) -> Any:
    """Returns the compiled kernel of ``launch``, for the active driver's target."""
    return launch.kernel.run(*launch.arguments, grid=launch.grid, warmup=True, **launch.options)


def streamable(*tensors: Tensor) -> bool:
    """Returns whether tensor descriptors can describe all ``tensors``."""
    for x in tensors:
        if x.stride(-1) != 1 or x.data_ptr() % 16:
            return False
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if size > 1 and (stride <= 0 or stride * x.element_size() % 16):
                return False
    return True


def legal_strides(x: Tensor) -> list[int]:
    """Returns the strides of ``x``, with a legal one for each dimension of size 1."""
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return [stride if size > 1 else x.shape[-1] * 8 for size, stride in outer] + [1]


def problem_of(
    kernel: Kernel, operands: Operands, dtype: torch.dtype, *streamed: Tensor
) -> Problem:
    """Returns the problem that a configuration must fit; descriptors may describe ``streamed``."""
    q, k, v = operands[:3]
    group, aligned = q.shape[1] // k.shape[1], streamable(*streamed)
    sizes = q.shape[3], dtype.itemsize, group
    return Problem(kernel, *sizes, aligned, v.shape[3], operands.extended)


def inside_cap(operands: Operands) -> float:
    """Returns the factor on q.k inside tanh, which fp32 holds; 1 without a softcap."""
    if operands.softcap is None:
        return 1.0
    return min(max(operands.scale / operands.softcap, -LARGEST_SCALE), LARGEST_SCALE)


def bounds_of(x: Tensor) -> tuple[Tensor, int]:
    """Returns an interval bound (B or 1, rows) and its stride between batch entries."""
    x = x.contiguous()
    return x, 0 if x.shape[0] == 1 else x.shape[1]
