"""``ring_attention``: exact attention over a sequence that is sharded over a ring of ranks.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim, Dv that
of the values.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention import compile as compiled
from ringray.attention import loops
from ringray.attention.agreement import refusing
from ringray.attention.arguments import resolve
from ringray.attention.call import read
from ringray.attention.documents import boundaries
from ringray.attention.other_names import answering_other_names
from ringray.attention.sharding import remember, remembered
from ringray.attention.tensor_arguments import ScoreParameters, TensorArguments, numbers
from ringray.base.units import plain
from ringray.comm.ring import RingGroup, connect
from ringray_kernels.checks import check_qkv
from ringray_kernels.modes import autocast, dispatching

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray.attention.problem import RankProblem
    from ringray.comm.ring import Comm
    from ringray.partition import Partitioning
    from ringray_kernels.config import Blocks


@answering_other_names
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: RingGroup = None,
    partition: Partitioning = partitions.DEFAULT,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    cu_seqlens: Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    chunk: int | None = None,
    prefix: int | Sequence[int] | None = None,
    global_tokens: int | None = None,
    shared_prefix: int | None = None,
    seq_len: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    quantize: str | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
    distance_bias: Tensor | None = None,
    attn_bias: Tensor | None = None,
    transport: str = transports.DEFAULT,
    backward: str = "auto",
    backend: str = "auto",
    blocks: Blocks | int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns exact softmax attention of this rank's queries over the keys of all ranks of a ring.

    Every rank of ``group`` calls it with its shard, as dealt by ``ringray.shard``. Under
    ``torch.compile`` it is one operator, ``ringray::attention``, with the same results.

    Under autocast it casts like SDPA does. Numbers may be NumPy's or 0-d tensors.

    Args:
        q: (B, Hq, S, D), this rank's rows, fp32, bf16 or fp16, any strides, D at most 512 (256 in
            fp32 with the backend ``triton``).
        k: (B, Hkv, S, D), the same dtype; Hq is a multiple of Hkv, and only the Hkv heads travel.
        v: (B, Hkv, S, Dv), the same dtype; Dv may be another head dim, as in multi-head latent
            attention.
        group: process group of the ring, or a ``DeviceMesh`` of one dimension; None is the default
            group if one is initialised, otherwise this process alone.
        partition: rule that deals positions to ranks, a name of ``ringray.partition.PARTITIONS``;
            what ``ringray.deal`` returns; ``balanced``, the same for this call's mask without
            window, chunk and global tokens, which layers of one model have or not; or
            ``auto``, the tuned choice (else zigzag), which ``ringray.tuned_strategy`` returns. The
            shards have to be dealt by it.
        causal: a query sees no key after it.
        window: a query at p sees keys ``[p - window, p]``, window + 1 of them; needs ``causal``.
            Or (left, right): keys ``[p - left, p + right]``, None for all on that side; with
            ``causal`` right is 0 or None.
        cu_seqlens: boundaries of packed documents, a list or a 1-D tensor of integers from 0 to the
            sequence length, not decreasing, on any device, shared by all batch rows; or a list of
            such lists or a 2-D tensor, with those of each batch row. A query sees its own document.
        chunk: a query sees its own of the chunks of this many positions that begin with each
            document (chunked attention, as in Llama 4).
        prefix: the first positions of each document, a number for all documents or a list with one
            for each: they see each other in both directions, whatever window and chunk say, and
            nothing else; later ones see them as the rest of the mask says (prefix-LM). Needs
            ``causal``.
        global_tokens: beside its window or chunk, of which it needs one, a query sees this many
            first positions of its document (attention sinks of StreamingLLM, global tokens of
            Longformer and BigBird), none after itself if ``causal``; else these see the whole
            document, too. Not with ``prefix``.
        shared_prefix: beside its document, window or chunk, of which it needs one, a query sees
            this many first positions of the sequence, none after itself if ``causal``: one prompt
            with many packed answers. Not with ``prefix`` or ``global_tokens``.
        seq_len: true global length (tokens) when the shards hold padding; None is the length that
            they remember from ``ringray.shard``, else N * S.
        scale: factor on q . k before the softmax, any number that fp32 holds; None is 1 / sqrt(D).
        softcap: scores s become softcap * tanh(s / softcap), after the scale and before the mask;
            None leaves them as they are.
        dropout_p: share of the weights that are dropped, at least 0, below 1: which ones, follows
            from the seed and their batch row, head and positions alone. The others are divided by
            1 - dropout_p; lse is that of all.
        dropout_seed: integer, the same on every rank; None is one that torch's generator on the CPU
            draws for each call, so ``torch.manual_seed`` governs it and has to be the same, too.
        quantize: ``fp8`` to send and multiply q, k and v in 8 bits (e4m3, a scale for each row of
            each head), where no gradient is needed; None is as they are given. Products in 8 bits
            take the backend ``triton`` on sm_89 or later; ``aten`` and ``reference`` widen them.
        sinks: (Hq,), fp32 or q's dtype, the same on every rank: a learned logit per head that takes
            part in the softmax without a value (attention sinks); None is none. The gradient of
            each rank is a share, and the sum over the ranks is the gradient, as for every parameter
            that all of them hold.
        alibi_slopes: (Hq,) or (B, Hq), numbers without gradient, the same on every rank: a head of
            slope m adds -m * |i - j| to the score of positions i and j, after the softcap (ALiBi);
            None is none.
        distance_bias: (Hq, 2 R + 1), fp32 or q's dtype, the same on every rank: a learned table of
            which head h adds entry ``[h, clamp(j - i, -R, R) + R]`` to the score of a query at i
            and a key at j, after the softcap; None is none. Not with alibi_slopes. Its gradient is
            a share on each rank, as that of sinks.
        attn_bias: (B or 1, Hq or 1, S, N * S), fp32 or q's dtype: what is added, after the softcap,
            to the score of each of this rank's rows, in the order of its shard, and each global
            position, padding included; None is none. Its gradient has its shape and is this rank's
            own. Values of hidden pairs change nothing; -inf hides a pair, where a large number
            would cost precision. Not with another bias, the transports ulysses, hybrid and auto,
            or backward ``query-side``.
        transport: way in which K/V reach the other ranks, a name of
            ``ringray.transport.TRANSPORTS``, or one with its parameter: ``hybrid:2``,
            ``double-ring:4``, ``allgather:2``; or ``auto``, the tuned choice (else ring).
        backward: operands that travel in the backward pass: ``planned`` (K/V walk afresh, dK/dV
            follow), ``reverse`` (K/V walk back from their last ranks; keeps one chunk more, with
            ``direct`` all that came), or ``query-side`` (Q, dO and dQ travel, K/V stay); ``auto``
            is ``planned``, or the tuned choice if ``transport`` is ``auto`` too.
        backend: kernels of this rank, ``auto`` or a name of ``ringray_kernels.backends``.
        blocks: block sizes of the backend, the same on every rank; None is the tuned choice for
            this shape and device, else the backend's default. ``triton`` takes a
            ``ringray.Blocks``, ``aten`` query rows per fused call (``reference`` ignores them).
        return_lse: also return the log-sum-exp.

    Returns:
        out (B, Hq, S, Dv) in q's dtype, accumulated in fp32; with ``return_lse`` a tuple of out and
        lse, fp32 (B, Hq, S), natural log, over keys and sink, differentiable too. Rows that see no
        key (padding) have out 0, lse -inf and gradient 0. dQ, dK and dV are accumulated in fp32
        over all hops; they have no gradients of their own.

    Raises:
        ValueError: wrong shapes, dtypes or names, or ranks that disagree about the problem; on
            every rank, before anything is sent.
    """
    settings = read(
        {
            "causal": causal,
            "window": window,
            "chunk": chunk,
            "prefix": prefix,
            "global_tokens": global_tokens,
            "shared_prefix": shared_prefix,
            "seq_len": seq_len,
            "scale": scale,
            "softcap": softcap,
            "dropout_p": dropout_p,
            "quantize": quantize,
            "partition": partition,
            "transport": transport,
            "backward": backward,
            "backend": backend,
            "blocks": blocks,
            "return_lse": return_lse,
        }
    )
    seed = plain(dropout_seed)
    slopes = numbers(alibi_slopes)
    tensors = TensorArguments(boundaries(cu_seqlens), sinks, slopes, distance_bias, attn_bias)
    needs_grad = torch.is_grad_enabled() and any(
        getattr(x, "requires_grad", False) for x in (q, k, v, *tensors.parameters)
    )
    compiling = torch.compiler.is_compiling()
    if compiling and "auto" in (partition, transport):
        raise ValueError(
            "partition and transport: got 'auto' while compiling, expected names, because the "
            "graph depends on them; ringray.tuned_strategy returns them beforehand"
        )
    comm = None if compiling else connect(group)
    with nullcontext() if comm is None else refusing(comm, once=True):
        if comm is not None:
            if settings["seq_len"] is None:
                settings["seq_len"] = remembered(q, k, v)
            if needs_grad and any(isinstance(x, Tensor) and x.is_inference() for x in (q, k, v)):
                raise ValueError(
                    "q, k, v: got a tensor that was made in inference mode where gradients are "
                    "needed, expected clones of it, or torch.no_grad() in place of that mode"
                )
        q, k, v = autocast(q, k, v)
        # A dispatch mode, as of a selective checkpoint, sees one operator that changes nothing.
        if comm is None or dispatching():
            if comm is not None:  # fake tensors do not reach the operator, in which ranks agree
                check_qkv(q, k, v)
            out, lse = compiled.attention(
                q, k, v, tensors, group, settings, seed, needs_grad=needs_grad
            )
        else:
            problem, number = resolve(
                q, k, v, tensors, settings, comm, needs_grad=needs_grad, seed=seed
            )
            results = _RingAttention.apply(problem, comm, number, q, k, v, *tensors.parameters)
            out, lse = cast("tuple[Tensor, Tensor]", results)
    if comm is not None:
        rows = q.shape[2] * comm.world_size
        for x in (out, lse):
            remember(x, settings["seq_len"] or rows, rows)
    return (out, lse) if return_lse else out


class _RingAttention(torch.autograd.Function):
    """Saves parameters and the tensors of the transport's backward pass: this rank's inputs, output
    and lse, and for some transports received chunks; see ``ringray.attention.loops``."""

    @staticmethod
    def forward(
        ctx: Any,
        problem: RankProblem,
        comm: Comm,
        number: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse, saved = loops.forward(q, k, v, problem, comm, ScoreParameters(*parameters))
        ctx.save_for_backward(*parameters, *saved)
        ctx.problem, ctx.comm, ctx.number, ctx.dtype = problem, comm, number, q.dtype
        ctx.set_materialize_grads(False)
        ctx.shape = out.shape
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(ScoreParameters._fields)
        tensors = ctx.saved_tensors  # which a checkpoint lets a pass read once
        parameters, saved = tensors[:count], tensors[count:]
        if dout is None:  # only lse was used
            dout = torch.zeros(ctx.shape, dtype=ctx.dtype, device=saved[0].device)
        backward = loops.backward
        if torch.compiler.is_compiling():  # compiled autograd, of a forward pass that was not
            backward = torch.compiler.disable(loops.backward)
        with torch.no_grad():
            gradients = backward(
                dout.to(ctx.dtype),
                dlse,
                saved,
                ctx.problem,
                ctx.comm,
                ctx.number,
                ScoreParameters(*parameters),
            )
        if torch.is_grad_enabled():  # create_graph
            gradients = tuple(
                x if x is None else _Constant.apply(x.requires_grad_()) for x in gradients
            )
        return None, None, None, *gradients


class _Constant(torch.autograd.Function):
    """A gradient that refuses to be differentiated, in place of giving 0."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "ring_attention: got a gradient of its gradients (create_graph=True), expected first "
            "derivatives only; scaled_dot_product_attention under SDPBackend.MATH has second ones"
        )
