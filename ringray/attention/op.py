"""``ring_attention``: exact attention over a sequence that is sharded over a ring of ranks.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention import compile as compiled
from ringray.attention import loops
from ringray.attention.arguments import Options, resolve
from ringray.comm.ring import connect

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringray.attention.problem import RankProblem
    from ringray.comm.ring import Comm
    from ringray_kernels.config import Blocks


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    partition: str = partitions.DEFAULT,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    transport: str = transports.DEFAULT,
    backward: str = "auto",
    backend: str = "auto",
    blocks: Blocks | int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns exact softmax attention of this rank's queries over the keys of all ranks of a ring.

    Every rank of ``group`` calls it with its shard, as dealt by ``ringray.shard``. Under
    ``torch.compile`` it is one operator, ``ringray::attention``, with the same results.

    Args:
        q: (B, Hq, S, D), this rank's rows, fp32, bf16 or fp16, any strides, D at most 256.
        k, v: (B, Hkv, S, D), the same dtype and D; Hq is a multiple of Hkv, and only the Hkv heads
            travel.
        group: process group of the ring; None is the default group if one is initialised, otherwise
            this process alone.
        partition: rule that deals positions to ranks, a name of ``ringray.partition.PARTITIONS``;
            or ``auto``, the tuned choice (else zigzag); the shards have to be dealt by it, and
            ``ringray.tuned_strategy`` returns it.
        causal: a query sees no key after it.
        window: a query at p sees keys ``[p - window, p]``, window + 1 of them; needs ``causal``.
        cu_seqlens: boundaries of packed documents, 1-D integers from 0 to the sequence length, not
            decreasing, on any device, shared by all batch rows. A query sees its own document.
        seq_len: true global length (tokens) when the shards hold padding; None means N * S.
        scale: factor on q . k before the softmax, any number that fp32 holds; None is 1 / sqrt(D).
        transport: way in which K/V reach the other ranks, a name of
        ``ringray.transport.TRANSPORTS``,
            or one with its parameter: ``hybrid:2``, ``double-ring:4``, ``allgather:2``; or
            ``auto``, the tuned choice (else ring).
        backward: operands that travel in the backward pass: ``planned`` (K/V walk afresh, dK/dV
            follow), ``reverse`` (K/V walk back from their last ranks; keeps one chunk more), or
            ``query-side`` (Q, dO and dQ travel, K/V stay); ``auto`` is ``planned``, or the tuned
            choice if ``transport`` is ``auto`` too.
        backend: kernels of this rank, ``auto`` or a name of ``ringray_kernels.backends``.
        blocks: block sizes of the backend, the same on every rank; None is the tuned choice for
            this shape and device, else the backend's default. ``triton`` takes a
            ``ringray.Blocks``, ``aten`` query rows per fused call (``reference`` ignores them).
        return_lse: also return the log-sum-exp.

    Returns:
        out (B, Hq, S, D) in q's dtype, accumulated in fp32; with ``return_lse`` a tuple (out, lse),
        lse fp32 (B, Hq, S), natural log, not differentiable. Rows that see no key (padding) have
        out 0, lse -inf and gradient 0. dQ, dK and dV are accumulated in fp32 over all hops.

    Raises:
        ValueError: wrong shapes, dtypes or names, or ranks that disagree about the problem; on
            every rank, before anything is sent.
    """
    options = Options(
        partition, causal, window, seq_len, scale, transport, backward, backend, blocks
    )
    needs_grad = torch.is_grad_enabled() and any(
        getattr(x, "requires_grad", False) for x in (q, k, v)
    )
    if torch.compiler.is_compiling():
        if "auto" in (partition, transport):
            raise ValueError(
                "partition and transport: got 'auto' while compiling, expected names, because the "
                "graph depends on them; ringray.tuned_strategy returns them beforehand"
            )
        out, lse = compiled.attention(q, k, v, cu_seqlens, group, options, needs_grad=needs_grad)
    else:
        comm = connect(group)
        problem = resolve(q, k, v, cu_seqlens, options, comm, needs_grad=needs_grad)
        out, lse = cast("tuple[Tensor, Tensor]", _RingAttention.apply(q, k, v, problem, comm))
    return (out, lse) if return_lse else out


class _RingAttention(torch.autograd.Function):
    """Saves the tensors of the transport's backward pass: this rank's inputs, output and lse, and
    for some transports received chunks; see ``ringray.attention.loops``."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: RankProblem, comm: Comm
    ) -> tuple[Tensor, Tensor]:
        out, lse, saved = loops.forward(q, k, v, problem, comm)
        ctx.save_for_backward(*saved)
        ctx.problem, ctx.comm, ctx.dtype = problem, comm, q.dtype
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
        backward = loops.backward
        if torch.compiler.is_compiling():  # compiled autograd, of a forward pass that was not
            backward = torch.compiler.disable(loops.backward)
        gradients = backward(dout.to(ctx.dtype), saved, ctx.problem, ctx.comm)
        return (*(x.to(ctx.dtype) for x in gradients), None, None)
