"""``ring_attention``: exact attention over a sequence that is sharded over a ring of ranks.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ringray import partition as partitions
from ringray import passes, walk
from ringray import transport as transports
from ringray.agreement import agree
from ringray.comm import connect
from ringray.geometry import Deal, Mask
from ringray.job import Job
from ringray_kernels.api import check_blocks, check_qkv, resolve_backend
from ringray_kernels.config import Blocks

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringray.comm import Comm


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    partition: str = "zigzag",
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    transport: str = "ring",
    backward: str = "auto",
    backend: str = "auto",
    blocks: Blocks | int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact softmax attention of this rank's queries over the keys of all ranks of a ring.

    Every rank of ``group`` calls it with its shard, as dealt by ``ringray.shard``.

    Args:
        q: (B, Hq, S, D), this rank's rows, fp32, bf16 or fp16, any strides, D at most 256.
        k, v: (B, Hkv, S, D), the same dtype and D; Hq is a multiple of Hkv, and only the Hkv heads
            travel.
        group: process group of the ring; None is the default group if one is initialised, otherwise
            this process alone.
        partition: how positions are dealt to ranks, a name of ``ringray.partition.PARTITIONS``.
        causal: a query sees no key after it.
        window: a query at p sees keys ``[p - window, p]``, window + 1 of them; needs ``causal``.
        cu_seqlens: boundaries of packed documents, 1-D integers from 0 to the sequence length, not
            decreasing, on any device, shared by all batch rows. A query sees its own document.
        seq_len: true global length (tokens) when the shards hold padding; None means N * S.
        scale: factor on q . k before the softmax; None is 1 / sqrt(D).
        transport: how K/V reach the other ranks, a name of ``ringray.transport.TRANSPORTS``, or one
            with its parameter: ``hybrid:2``, ``double-ring:4``, ``allgather:2``.
        backward: what travels in the backward pass: ``planned`` (K/V walk afresh, dK/dV follow),
            ``reverse`` (K/V walk back from where they went last; keeps one chunk more), or
            ``query-side`` (Q, dO and dQ travel, K/V stay); ``auto`` is ``planned``.
        backend: what computes on this rank: ``auto`` or a name of ``ringray_kernels.backends``.
        blocks: how a backend cuts its work, the same on every rank; None is the backend's default.
            ``triton`` takes a ``ringray.Blocks``, ``aten`` query rows per fused call (``reference``
            accepts and ignores them).
        return_lse: also return the log-sum-exp.

    Returns:
        out (B, Hq, S, D) in q's dtype, accumulated in fp32; with ``return_lse`` a tuple (out, lse),
        lse fp32 (B, Hq, S), natural log, not differentiable. Rows that see no key (padding) have
        out 0, lse -inf and gradient 0. dQ, dK and dV are accumulated in fp32 over all hops.

    Raises:
        ValueError: wrong shapes, dtypes or names, or ranks that disagree about the problem; on
            every rank, before anything is sent.
    """
    comm = connect(group)
    try:
        check_qkv(q, k, v)
        job = _job(
            q, k, comm, partition=partition, causal=causal, window=window, cu_seqlens=cu_seqlens,
            seq_len=seq_len, scale=scale, transport=transport, backward=backward, backend=backend,
            blocks=blocks,
        )  # fmt: skip
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        agree(comm, None, error, device=getattr(q, "device", torch.device("cpu")))
        raise
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    agree(comm, _signature(job, q, k, transport, needs_grad), None, device=q.device)
    out, lse = cast("tuple[Tensor, Tensor]", _RingAttention.apply(q, k, v, job, comm))
    return (out, lse) if return_lse else out


def _job(
    q: Tensor,
    k: Tensor,
    comm: Comm,
    *,
    partition: str,
    causal: bool,
    window: int | None,
    cu_seqlens: Tensor | None,
    seq_len: int | None,
    scale: float | None,
    transport: str,
    backward: str,
    backend: str,
    blocks: Blocks | int | None,
) -> Job:
    """The validated problem; ValueError says what was given and what is expected."""
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: got {k.shape[2]} rows, expected q's {q.shape[2]}: shards are equal")
    for name, value, least in (("window", window, 0), ("seq_len", seq_len, 1)):
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < least
        ):
            raise ValueError(
                f"{name}: got {value!r}, expected None or an integer of at least {least}"
            )
    if not isinstance(causal, bool):
        raise ValueError(f"causal: got {causal!r}, expected True or False")
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if scale is not None and not (number and math.isfinite(scale)):
        raise ValueError(f"scale: got {scale!r}, expected None or a finite number")
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
    job = Job(
        deal=Deal(partition, padded, comm.world_size // fold, fold),
        rank=comm.rank // fold,
        mask=Mask(length, causal, window, document_boundaries(cu_seqlens, length)),
        exchange=exchange,
        backward=walk.resolve_backward(backward, transport, walks=exchange.walks),
        costs=walk.costs(q.element_size(), batch, heads // fold, kv_heads // fold, head_dim),
        scale=head_dim**-0.5 if scale is None else float(scale),
        backend=backend,
        blocks=blocks,
    )
    _ = job.walks  # says why, if the backward walk cannot be
    comm.check(q.device, staged=exchange.staged)
    return job


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


def _signature(job: Job, q: Tensor, k: Tensor, transport: str, needs_grad: bool) -> dict[str, Any]:
    """Everything that all ranks must have in common."""
    return {
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "rows per rank": q.shape[2],
        "head_dim": q.shape[3],
        "dtype": str(q.dtype).removeprefix("torch."),
        "partition": job.deal.partition,
        "causal": job.mask.causal,
        "window": job.mask.window,
        "seq_len": job.mask.seq_len,
        "cu_seqlens": job.mask.documents,
        "scale": job.scale,
        "transport": transport,
        "backward": job.backward,
        "backend": job.backend,
        "blocks": _said(job.blocks),
        "requires_grad": needs_grad,
    }


def _said(blocks: Blocks | int | None) -> str | int | None:
    """``blocks`` as ranks compare them; one that configures nothing is the default."""
    return (str(blocks) or None) if isinstance(blocks, Blocks) else blocks


class _RingAttention(torch.autograd.Function):
    """Saves what the transport's backward pass needs: this rank's inputs, output and lse, and for
    some transports what this rank received; see ``ringray.passes``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, job: Job, comm: Comm
    ) -> tuple[Tensor, Tensor]:
        out, lse, saved = passes.forward(q, k, v, job, comm)
        ctx.save_for_backward(*saved)
        ctx.job, ctx.comm, ctx.dtype = job, comm, q.dtype
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.shape = out.shape
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        if dout is None:  # only lse was used, and it carries no gradient
            dout = torch.zeros(ctx.shape, dtype=ctx.dtype, device=saved[0].device)
        gradients = passes.backward(dout.to(ctx.dtype), saved, ctx.job, ctx.comm)
        return (*(x.to(ctx.dtype) for x in gradients), None, None)
