"""Arguments of one call: checked, resolved to a ``RankProblem``, agreed on by all ranks.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention.agreement import Signature, agree, refusing
from ringray.attention.problem import RankProblem
from ringray.base.provenance import version
from ringray.comm.ring import Comm
from ringray.traffic import walk
from ringray.traffic.geometry import Layout, Mask
from ringray.tuning import lookup
from ringray.tuning import table as tuned
from ringray_kernels.api import check_blocks, check_qkv, resolve_backend, unusable_scale
from ringray_kernels.config import Blocks


class Options(NamedTuple):
    """The arguments of ``ringray.ring_attention``, as given, except tensors and the group."""

    partition: str
    causal: bool
    window: int | None
    seq_len: int | None
    scale: float | None
    transport: str
    backward: str
    backend: str
    blocks: Blocks | int | None


def resolve(
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
    """Returns the problem of one forward pass, on which all ranks agree.

    ``refused``: a mistake that the caller has found already.

    Raises:
        ValueError: on every rank, if the problem is wrong on one or not the same on all.
    """
    with refusing(comm, getattr(q, "device", torch.device("cpu"))):
        if refused is not None:
            raise ValueError(refused)
        check_qkv(q, k, v)
        options = _filled(q, k, cu_seqlens, options, comm, needs_grad=needs_grad)
        problem = describe(q, k, cu_seqlens, options, comm)
    agree(comm, _signature(problem, q, k, options.transport, needs_grad), device=q.device)
    return problem


def describe(
    q: Tensor, k: Tensor, cu_seqlens: Tensor | None, options: Options, comm: Comm
) -> RankProblem:
    """Returns the problem of tensors like ``q`` (B, Hq, S, D) and ``k`` (B, Hkv, S, D).

    Raises:
        ValueError: what was given and what is expected.
    """
    batch, heads, rows, head_dim = q.shape
    kv_heads, ranks = k.shape[1], comm.world_size
    if k.shape[2] != rows:
        raise ValueError(f"k: got {k.shape[2]} rows, expected q's {rows}: shards are equal")
    if wrong := mistake(options):
        raise ValueError(wrong)
    partition, causal, window, seq_len, scale, transport, backward, backend, blocks = options
    length = partitions.true_length(partition, seq_len, rows, ranks)
    backend = resolve_backend(backend, q)
    check_blocks(blocks, backend)
    exchange = transports.plan(transport, ranks, heads, kv_heads)
    fold = exchange.fold
    problem = RankProblem(
        layout=Layout(partition, rows * ranks, ranks // fold, fold),
        rank=comm.rank // fold,
        mask=Mask(length, causal, window, document_boundaries(cu_seqlens, length)),
        exchange=exchange,
        backward=walk.resolve_backward(backward, transport, walks=exchange.walks),
        costs=walk.costs(q.element_size(), batch, heads // fold, kv_heads // fold, head_dim),
        scale=head_dim**-0.5 if scale is None else float(scale),
        backend=backend,
        blocks=blocks,
    )
    _ = problem.walks  # raises where the backward walk is impossible
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
    """Fills what ``options`` leave open with the tuned choice, or the default."""
    strategy_open = "auto" in (options.partition, options.transport)
    if not strategy_open and (options.blocks is not None or not lookup.anything_tuned()):
        return options
    if wrong := mistake(options, types_only=True):
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


def mistake(options: Options, *, types_only: bool = False) -> str | None:
    """Returns the first mistake in numbers and flags, or None. ``types_only``: values are
    not checked."""
    for name, least in (("window", 0), ("seq_len", 1)):
        value = getattr(options, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (whole and (types_only or value >= least)):
            return f"{name}: got {value!r}, expected None or an integer of at least {least}"
    causal: object = options.causal
    if not isinstance(causal, bool):
        return f"causal: got {causal!r}, expected True or False"
    return None if options.scale is None else unusable_scale(options.scale)


def document_boundaries(cu_seqlens: Tensor | None, seq_len: int) -> tuple[int, ...] | None:
    """Returns ``cu_seqlens`` as a tuple; ``Mask`` checks its values against ``seq_len``."""
    if cu_seqlens is None:
        return None
    given: object = cu_seqlens
    if not isinstance(given, Tensor):
        raise ValueError(
            f"cu_seqlens: got {type(given).__name__}, expected a 1-D tensor of integers"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens: got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}, expected a "
            "1-D tensor of integers"
        )
    return tuple(cu_seqlens.tolist())


def _signature(
    problem: RankProblem, q: Tensor, k: Tensor, transport: str, needs_grad: bool
) -> Signature:
    blocks = problem.blocks
    # Blocks that configure nothing are the default.
    compared = (str(blocks) or None) if isinstance(blocks, Blocks) else blocks
    return Signature(
        batch=q.shape[0],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        rows_per_rank=q.shape[2],
        head_dim=q.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        partition=problem.layout.partition,
        causal=problem.mask.causal,
        window=problem.mask.window,
        seq_len=problem.mask.seq_len,
        cu_seqlens=problem.mask.documents,
        scale=problem.scale,
        transport=transport,
        backward=problem.backward,
        backend=problem.backend,
        blocks=compared,
        requires_grad=needs_grad,
        version=version(),
    )
