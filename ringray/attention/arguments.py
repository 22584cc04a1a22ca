"""The arguments of one call: checked, made a ``RankProblem``, agreed on by all ranks.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention.agreement import agree
from ringray.attention.problem import RankProblem
from ringray.traffic import walk
from ringray.traffic.geometry import Layout, Mask
from ringray.tuning import lookup
from ringray.tuning import table as tuned
from ringray_kernels.api import check_blocks, check_qkv, resolve_backend
from ringray_kernels.config import Blocks

if TYPE_CHECKING:
    from ringray.comm.ring import Comm


class Options(NamedTuple):
    """The arguments of ``ringray.ring_attention`` that are no tensors and no group."""

    partition: str
    causal: bool
    window: int | None
    seq_len: int | None
    scale: float | None
    transport: str
    backward: str
    backend: str
    blocks: Blocks | int | None


def settle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    options: Options,
    comm: Comm,
    *,
    needs_grad: bool,
    refused: str | None = None,
) -> RankProblem:
    """The problem of one forward pass, which all ranks agree on.

    ``refused``: what the caller already found wrong with it.

    Raises:
        ValueError: on every rank, if it is wrong on one, or not the same on all.
    """
    try:
        if refused is not None:
            raise ValueError(refused)
        check_qkv(q, k, v)
        options = _filled(q, k, cu_seqlens, options, comm, needs_grad=needs_grad)
        problem = describe(q, k, cu_seqlens, options, comm)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        agree(comm, None, error, device=getattr(q, "device", torch.device("cpu")))
        raise
    agree(comm, _signature(problem, q, k, options.transport, needs_grad), None, device=q.device)
    return problem


def describe(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, options: Options, comm: Comm
) -> RankProblem:
    """The problem of tensors like ``q`` (B, Hq, S, D) and ``k`` (B, Hkv, S, D).

    Raises:
        ValueError: what was given and what is expected.
    """
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: got {k.shape[2]} rows, expected q's {q.shape[2]}: shards are equal")
    partition, causal, window, seq_len, scale, transport, backward, backend, blocks = options
    wrong = mistyped(options)
    for name, least in _LEAST.items():
        value = getattr(options, name)
        if not wrong and value is not None and value < least:
            wrong = _integer(name, value)
    if not wrong and scale is not None and not math.isfinite(scale):
        wrong = _number(scale)
    if wrong:
        raise ValueError(wrong)
    padded = comm.world_size * q.shape[2]
    length = padded if seq_len is None else seq_len
    expected = partitions.padded_length(partition, length, comm.world_size)
    if expected != padded:
        raise ValueError(
            f"seq_len: {comm.world_size} ranks x {q.shape[2]} rows = {padded} positions, but "
            f"partition {partition!r} deals {length} tokens as {expected} "
            f"({expected // comm.world_size} rows a rank); pad and deal with ringray.shard"
        )
    backend = resolve_backend(backend, q)
    check_blocks(blocks, backend)
    batch, heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    exchange = transports.plan(transport, comm.world_size, heads, kv_heads)
    fold = exchange.fold
    problem = RankProblem(
        layout=Layout(partition, padded, comm.world_size // fold, fold),
        rank=comm.rank // fold,
        mask=Mask(length, causal, window, document_boundaries(cu_seqlens, length)),
        exchange=exchange,
        backward=walk.resolve_backward(backward, transport, walks=exchange.walks),
        costs=walk.costs(q.element_size(), batch, heads // fold, kv_heads // fold, head_dim),
        scale=head_dim**-0.5 if scale is None else float(scale),
        backend=backend,
        blocks=blocks,
    )
    _ = problem.walks  # says why, if the backward walk cannot be
    comm.check(q.device, staged=exchange.staged)
    return problem


def _filled(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    options: Options,
    comm: Comm,
    *,
    needs_grad: bool,
) -> Options:
    """``options`` with the tuned choice, or the default, for what they leave open."""
    strategy_open = "auto" in (options.partition, options.transport)
    if not strategy_open and (options.blocks is not None or not lookup.anything_tuned()):
        return options
    if wrong := mistyped(options):
        raise ValueError(wrong)
    backend = resolve_backend(options.backend, q)
    name = torch.cuda.get_device_name(q.device) if q.device.type == "cuda" else "cpu"
    found = lookup.for_process(
        tuned.buckets(
            ring_size=comm.world_size,
            threads=0 if q.device.type == "cuda" else torch.get_num_threads(),
            dtype=str(q.dtype).removeprefix("torch."),
            seq_len=options.seq_len or comm.world_size * q.shape[2],
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[3],
            causal=options.causal,
            window=options.window,
            documents=cu_seqlens,
            backward=needs_grad,
        ),
        name, options.partition, options.transport, options.backward, backend,
    )  # fmt: skip
    cut = options.blocks
    if cut is None:
        cut = Blocks.parse(found.blocks) if isinstance(found.blocks, str) else found.blocks
    return options._replace(
        partition=found.partition, transport=found.transport, backward=found.backward, blocks=cut
    )


_LEAST = {"window": 0, "seq_len": 1}


def mistyped(options: Options) -> str | None:
    """What is wrong with the types of ``options``, or None; of names and blocks, others say it."""
    for name in _LEAST:
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            return _integer(name, value)
    causal: object = options.causal
    if not isinstance(causal, bool):
        return f"causal: got {causal!r}, expected True or False"
    scale = options.scale
    if scale is not None and (not isinstance(scale, int | float) or isinstance(scale, bool)):
        return _number(scale)
    return None


def _integer(name: str, value: object) -> str:
    return f"{name}: got {value!r}, expected None or an integer of at least {_LEAST[name]}"


def _number(scale: object) -> str:
    return f"scale: got {scale!r}, expected None or a finite number"


def document_boundaries(cu_seqlens: Tensor | None, seq_len: int) -> tuple[int, ...] | None:
    """``cu_seqlens`` as a tuple; ``Mask`` checks its values against ``seq_len``."""
    if cu_seqlens is None:
        return None
    if (
        not isinstance(cu_seqlens, Tensor)
        or cu_seqlens.dim() != 1
        or cu_seqlens.is_floating_point()
    ):
        given = (
            f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
            if isinstance(cu_seqlens, Tensor)
            else type(cu_seqlens).__name__
        )
        raise ValueError(f"cu_seqlens: got {given}, expected a 1-D tensor of integers")
    return tuple(cu_seqlens.tolist())


def _signature(
    problem: RankProblem, q: Tensor, k: Tensor, transport: str, needs_grad: bool
) -> dict[str, Any]:
    """Everything that all ranks must have in common."""
    return {
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "rows per rank": q.shape[2],
        "head_dim": q.shape[3],
        "dtype": str(q.dtype).removeprefix("torch."),
        "partition": problem.layout.partition,
        "causal": problem.mask.causal,
        "window": problem.mask.window,
        "seq_len": problem.mask.seq_len,
        "cu_seqlens": problem.mask.documents,
        "scale": problem.scale,
        "transport": transport,
        "backward": problem.backward,
        "backend": problem.backend,
        "blocks": _said(problem.blocks),
        "requires_grad": needs_grad,
    }


def _said(blocks: Blocks | int | None) -> str | int | None:
    """``blocks`` as ranks compare them; one that configures nothing is the default."""
    return (str(blocks) or None) if isinstance(blocks, Blocks) else blocks
