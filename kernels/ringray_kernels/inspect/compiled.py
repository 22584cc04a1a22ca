"""One kernel compiled for a GPU that need not be present: registers, spills, shared memory,
instructions.

Launches are built as for a run, on tensors without memory, and compiled with triton's own
specialisation of their arguments, so the result is the code that would run.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from ringray_kernels import quantize
from ringray_kernels.api import BackwardOperands, Operands, State
from ringray_kernels.backends.triton import launch as launches
from ringray_kernels.backends.triton.arguments import Launch, compile_launch, configured
from ringray_kernels.bias import Bias
from ringray_kernels.config import BlockConfig, Blocks, Kernel, Problem, Target, target_named
from ringray_kernels.dropout import Dropout
from ringray_kernels.dtypes import torch_dtype
from ringray_kernels.inspect.listing import (
    GCN,
    SASS,
    count,
    gcn_instructions,
    inner_loops,
    sass_instructions,
    spilled_bytes,
    whole_tiles,
)
from ringray_kernels.intervals import Positions


@dataclass(frozen=True)
class Case:
    """One kernel to compile; ``config`` None is the default. ``group`` query heads share a
    key/value head; forward is a middle hop, with the state in and out. ``value_dim``: head dim of
    V, 0 if it is that of Q; ``bias``: the shape of the values of
    one, see ``Bias``; ``quantized``: q, k and v are e4m3 with scales."""

    target: str
    kernel: Kernel
    head_dim: int
    dtype: str = "bfloat16"
    group: int = 1
    config: BlockConfig | None = None
    value_dim: int = 0
    softcap: float | None = None
    bias: tuple[int, ...] = ()
    dropout_p: float = 0.0
    quantized: bool = False


@dataclass(frozen=True)
class Compiled:
    """Properties of the code of one case.

    ``registers``: per thread; ``spilled``: bytes that a thread stores and loads in all,
    ``inner_spilled``: in the inner loops; ``whole_spilled``: in those over whole tiles;
    ``serialised``: ptxas gave up asynchronous products; ``listing``: the disassembly; ``asm``: the
    stages of the compiler, by Triton's names.
    """

    case: Case
    config: BlockConfig
    registers: int
    spilled: int
    inner_spilled: int
    whole_spilled: int
    shared_bytes: int
    serialised: bool
    instructions: dict[str, int]
    listing: str = field(repr=False)
    asm: Mapping[str, Any] = field(repr=False)


class _Absent:
    """A driver for a target without a device."""

    _targets: list[GPUTarget] = []  # noqa: RUF012 - one per architecture met, shared

    def __init__(self, target: Target) -> None:
        backend, arch = ("hip", target.name) if target.is_amd else ("cuda", int(target.name[3:]))
        self._target = GPUTarget(backend, arch, target.warp_size)
        if self._target not in self._targets:
            self._targets.append(self._target)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._targets.index(self._target)  # triton caches compiled code per device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def absent(target: Target) -> Iterator[None]:
    """Lets triton compile for ``target``, which need not be present."""
    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Absent(target))
    try:
        yield
    finally:
        triton.runtime.driver._active = previous


def launch_of(case: Case) -> tuple[Launch, BlockConfig]:
    """Returns the launch of ``case`` on tensors without memory, and its configuration."""
    target = target_named(case.target)
    dtype = quantize.DTYPE if case.quantized else torch_dtype(case.dtype)
    rows, kv_heads, batch = 4096, 2, 1
    heads = kv_heads * case.group

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    values = case.value_dim or case.head_dim
    q, dout = (tensor(batch, heads, rows, dim, dtype=dtype) for dim in (case.head_dim, values))
    k, v = (tensor(batch, kv_heads, rows, dim, dtype=dtype) for dim in (case.head_dim, values))
    out, dq = tensor(*dout.shape), tensor(*q.shape)
    dk, dv = tensor(*k.shape), tensor(*v.shape)
    lse, delta = tensor(batch, heads, rows), tensor(batch, heads, rows)
    start, end = (tensor(1, rows, dtype=torch.int32) for _ in range(2))
    blocks = Blocks(**{case.kernel: case.config})
    bias = None
    if case.bias:
        learned = len(case.bias) > 2 or None
        bias = Bias(start[0], end[0], tensor(*case.bias), learned and tensor(*case.bias))
    operands = Operands(q, k, v, start, end, 0.1, blocks, case.softcap, bias)
    if case.dropout_p:
        positions = Positions(start[0], start[0])
        operands = operands._replace(dropout=Dropout(case.dropout_p, 1 << 40), at=positions)
    if case.quantized:
        of_q, of_k, of_v = (tensor(*x.shape[:3]) for x in (q, k, v))
        operands = operands._replace(scales=(of_q, of_k, of_v))
    backward = BackwardOperands(dout, None, lse, delta, dq, dk, dv)
    if case.kernel == "forward":
        launch = launches.forward_launch(operands, State(out, lse), State(out, lse), target, dtype)
    elif case.kernel == "dq":
        launch = launches.dq_launch(operands, backward, target, dtype)
    else:
        *_, launch = launches.dkv_launches(operands, backward, start, end, target, dtype)
    sizes = case.head_dim, dtype.itemsize, case.group
    problem = Problem(case.kernel, *sizes, True, values, operands.extended)
    config = configured(case.config, problem, target)
    return launch, config


def compile_case(case: Case) -> Compiled:
    """Compiles ``case`` for its target.

    Raises:
        ValueError: no configuration fits. Triton raises its own errors if the compiler refuses.
    """
    target = target_named(case.target)
    launch, config = launch_of(case)
    with absent(target):
        made = compile_launch(launch)
    if target.is_amd:
        syntax, listing, serialised = GCN, made.asm["amdgcn"], False
        registers = _number(r"\.vgpr_count:\s*(\d+)", listing)
    else:
        syntax, (listing, log) = SASS, _disassembled(made.asm, target)
        registers, serialised = _number(r"Used (\d+) registers", log), "serialized" in log
    code = (gcn_instructions if target.is_amd else sass_instructions)(listing)
    loops = inner_loops(code, syntax.product)
    spilled, inner, whole = (
        sum(spilled_bytes(part, syntax.spill) for part in parts)
        for parts in ([code], loops, whole_tiles(loops))
    )
    counts = {name: count(code, pattern) for name, pattern in syntax.classes.items()}
    spills, shared, asm = (spilled, inner, whole), made.metadata.shared, dict(made.asm)
    return Compiled(case, config, registers, *spills, shared, serialised, counts, listing, asm)


def _number(pattern: str, text: str) -> int:
    """Returns the number that a tool tells of the code."""
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"expected {pattern!r} in {text[:500]!r}")
    return int(match[1])


def _disassembled(asm: Mapping[str, Any], target: Target) -> tuple[str, str]:
    """Returns the listing of code for NVIDIA, and what the assembler says of it."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    arch = int(target.name[3:])
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(asm["ptx"])
        ptxas = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}"]
        log = _output_of([*ptxas, str(ptx), "-o", str(cubin)]).stderr
        cubin.write_bytes(asm["cubin"])
        return _output_of([triton.knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]).stdout, log


def _output_of(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)
