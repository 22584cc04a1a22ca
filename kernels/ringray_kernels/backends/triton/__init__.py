"""Triton kernels for CUDA and ROCm; on a CPU in Triton's interpreter (``TRITON_INTERPRET=1``).

In reading order: ``tiles`` (shared parts), ``forward``, ``backward``, ``dq``; for Hopper ``hopper``
(shared parts), ``hopper_forward``, ``hopper_dkv``, ``hopper_dq``; ``plan`` (which block visits what
and when), ``arguments`` and ``launch``, ``hopper_launch`` (launches as data).
``ringray_kernels.defaults`` holds the block configurations, docs/kernels.md the design and the
experiments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ringray_kernels.api import PLAIN, BackwardOperands, Features, Operands, State
from ringray_kernels.backends.triton.arguments import INTERPRETED, architecture, run
from ringray_kernels.backends.triton.launch import (
    delta_launch,
    dkv_launches,
    dq_launch,
    forward_launch,
)
from ringray_kernels.bias import LEAST_LSE
from ringray_kernels.checks import TensorKind
from ringray_kernels.config import KERNELS, Blocks, Problem, target_named
from ringray_kernels.defaults import default
from ringray_kernels.intervals import derived, inverse

_MOST_ROWS = 256  # of a tile; see config.supports


def unsupported(q: TensorKind, asked: Features = PLAIN) -> str | None:
    """Returns why these kernels cannot compute on tensors like ``q``, or None."""
    if q.device.type == "cpu" and not INTERPRETED:
        return "a CPU needs TRITON_INTERPRET=1 set before the import"
    compiles = q.device.type == "meta" and not INTERPRETED  # see ``arguments.run``
    if q.device.type not in ("cpu", "cuda") and not compiles:
        return f"got device {q.device.type!r}, expected 'cuda'"
    try:
        target = target_named(architecture(q.device))
        dims, extended = (q.shape[-1], asked.value_dim or 0), asked.extended
        itemsize = 1 if asked.quantized else q.dtype.itemsize
        for kernel in KERNELS[:1] if asked.quantized else KERNELS:
            default(Problem(kernel, dims[0], itemsize, 1, True, dims[1], extended), target)
    except (ValueError, RuntimeError) as error:  # RuntimeError: no driver is active
        return str(error)
    return None


def forward(operands: Operands, state: State | None, out_dtype: torch.dtype) -> State:
    """Computes one hop and merges it into ``state``; see ``ringray_kernels.api.forward``."""
    q, dtype = operands.q, operands.q.dtype
    if state is not None:
        state = State(state.out.contiguous(), state.lse.contiguous())
    if state is not None and out_dtype == torch.float32:
        out, lse = state  # the kernel merges in place
    else:
        shape = (*q.shape[:3], operands.v.shape[3])
        out = torch.empty(shape, dtype=_stored(out_dtype), device=q.device)
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    target = target_named(architecture(q.device))
    run(forward_launch(_launchable(operands), State(out, lse), state, target, dtype), q.device)
    return State(out.to(out_dtype), lse)


def backward(operands: Operands, tensors: BackwardOperands) -> None:
    """Adds the gradients of one hop in place; see ``ringray_kernels.api.backward``."""
    dtype, device = operands.q.dtype, operands.q.device
    target, operands = target_named(architecture(device)), _launchable(operands)
    dout, out, lse, delta, dq, dk, dv = tensors
    if operands.bias is not None:
        # A row whose biases are all -inf has weights of 0, not of exp(-inf + inf).
        lse = lse.clamp(min=LEAST_LSE)
    # By blocks of keys, the dK and dV kernel needs the rows that see each key.
    first, stop = _inverses(operands.start, operands.end, operands.k.shape[2])
    with contextlib.ExitStack() as stack:
        dq = stack.enter_context(_added_in_place(dq, dq.is_contiguous()))
        dk = stack.enter_context(_added_in_place(dk, dk.stride(-1) == 1))
        dv = stack.enter_context(_added_in_place(dv, dv.stride(-1) == 1))
        tensors = BackwardOperands(
            _readable(dout), out, lse.contiguous(), delta.contiguous(), dq, dk, dv
        )
        for launch in dkv_launches(operands, tensors, first, stop, target, dtype):
            run(launch, device)
        for part, part_tensors in _turns(operands, tensors):
            # The dQ kernel knows no strides of dq: a part of its heads may have to be copied.
            with _added_in_place(part_tensors.dq, part_tensors.dq.is_contiguous()) as own:
                launch = dq_launch(part, part_tensors._replace(dq=own), target, dtype)
                run(launch, device)
            if part.bias is not None and launch.sums is not None:
                part.bias.collect(launch.sums)


def _turns(
    operands: Operands, tensors: BackwardOperands
) -> Iterator[tuple[Operands, BackwardOperands]]:
    """Yields the parts of a pass in which no two programs add to one gradient of a bias: those of
    each batch entry, by intervals that are empty in the others, or head, or all at once."""
    q, k, v, start, end, _, blocks, _, bias, dropout, *_ = operands
    # Without atomics, so that results repeat bitwise: what shares a gradient takes turns.
    by_entry, by_head = bias.shared(q) if bias is not None else (False, False)
    for entry in range(len(q)) if by_entry else (None,):
        part = operands
        if entry is not None:
            lows, ends = (x.expand(len(q), -1) for x in (start, end))
            seen = lows.clone()
            seen[entry] = ends[entry]
            part = operands._replace(start=lows, end=seen)
        if not by_head:
            yield part, tensors
            continue
        # One head alone cannot be packed with others.
        blocks = replace(blocks, dq=blocks.dq and replace(blocks.dq, pack=1))
        for head in range(q.shape[1]):
            own, kv_head = slice(head, head + 1), head * k.shape[1] // q.shape[1]
            keys, values = (x[:, kv_head : kv_head + 1] for x in (k, v))
            dout, lse, delta, dq = (
                x[:, own] for x in (tensors.dout, tensors.lse, tensors.delta, tensors.dq)
            )
            drop = dropout and dropout._replace(head=dropout.head + head)
            yield (
                part._replace(q=q[:, own], k=keys, v=values, blocks=blocks, dropout=drop),
                tensors._replace(dout=dout, lse=lse.contiguous(), delta=delta.contiguous(), dq=dq),
            )


def delta(dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Returns rowsum(dout * out) in fp32; see ``ringray_kernels.api.delta``."""
    dout, out = _readable(dout), _readable(out)
    result = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    run(delta_launch(dout, out, lse.contiguous(), result), dout.device)
    return result


def _inverses(start: Tensor, end: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Returns the query rows that see each key row, int32 (B or 1, num_keys); made once for the
    same intervals."""

    def make() -> tuple[Tensor, Tensor]:
        pairs = [inverse(*pair, num_keys) for pair in zip(start, end, strict=True)]
        first, stop = (torch.stack(side) for side in zip(*pairs, strict=True))
        return first, stop

    return derived(start, end, ("inverse", num_keys), make)


def _launchable(operands: Operands) -> Operands:
    q, k, v = (_readable(x) for x in operands[:3])
    return operands._replace(q=q, k=k, v=v, blocks=operands.blocks or Blocks())


def _readable(x: Tensor) -> Tensor:
    """Returns ``x``, in fp32 for the interpreter, which cannot multiply bf16; a contiguous copy if
    offsets within a tile pass the 32 bits that the kernels use for them."""
    rows, columns = x.stride()[-2:]
    if max(rows * _MOST_ROWS, columns * x.shape[-1]) >= 2**31:
        x = x.contiguous()
    return x.float() if INTERPRETED and x.dtype == torch.bfloat16 else x


def _stored(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to store for ``dtype``: the interpreter truncates bf16, GPUs round."""
    return torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype


@contextlib.contextmanager
def _added_in_place(x: Tensor, usable: bool) -> Iterator[Tensor]:
    """Yields ``x`` if the kernels can add to it, else a contiguous copy that is copied back."""
    if usable:
        yield x
        return
    copy = x.contiguous()
    yield copy
    x.copy_(copy)
