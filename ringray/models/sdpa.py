"""``context_parallel``: ring attention for code that calls ``scaled_dot_product_attention``.

A ``TorchFunctionMode`` catches the calls on this thread inside of the block, under any imported
name and without patching. A mode is off while it handles a call, and backward is such a call; it is
called in a way that keeps the mode on, so that autograd carries it along, also to its own threads,
and checkpointed layers recompute with the ring.

No mode sees scripted code and other threads. Whatever they call ends in one of PyTorch's attention
kernels, which refuse to run during a block for any caller but the ring.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention import ring_attention
from ringray.attention.agreement import refusing
from ringray.attention.deal import deal
from ringray.attention.sharding import shard
from ringray.base.units import plain
from ringray.comm.ring import RingGroup, connect, place_in
from ringray.models.attention_kernels import kernels_refuse, other_attention
from ringray.partition import Partitioning
from ringray_kernels.config import Blocks

_ROUTED = {
    F.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_BACKWARD = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}
# Functions that attend inside of one call, which no mode sees.
_OPAQUE = {
    "multi_head_attention_forward",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
    "flex_attention",
}


class SdpaCall(NamedTuple):
    """The arguments of ``scaled_dot_product_attention``, (B, H, S, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@contextmanager
def context_parallel(
    group: RingGroup = None,
    *,
    partition: Partitioning = partitions.DEFAULT,
    transport: str = transports.DEFAULT,
    backend: str = "auto",
    blocks: Blocks | int | None = None,
    buffers: Sequence[Tensor] = (),
    buffer_dims: Sequence[int] = (),
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] = (),
    pad_values: float | Sequence[float] | None = 0,
    seq_len: int | None = None,
    cu_seqlens: Tensor | None = None,
    window: int | None = None,
    **options: Any,
) -> Iterator[tuple[Tensor, ...]]:
    """Routes calls of ``scaled_dot_product_attention`` in the block to the whole ring.

    ::

        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        with ringray.context_parallel(
            buffers=(ids, labels, positions), buffer_dims=(1, 1, 1), pad_values=(0, -100, 0)
        ) as (ids, labels, positions):
            loss = ringray.sharded_cross_entropy(model(ids, positions), labels)
            loss.backward()

    The model sees this rank's rows only: code that depends on positions (RoPE, learned embeddings)
    must take them from a buffer, not from ``arange`` over its own rows. Every SDPA call of the
    block is routed, so it is for models whose only attention is over the sharded sequence.

    Call backward inside of the block if the model checkpoints activations, since it recomputes
    layers; outside of the block PyTorch's check of recomputed tensors raises. Without checkpointing
    backward may be called anywhere.

    Args:
        group, partition, transport, backend, blocks, cu_seqlens, window: as in ``ring_attention``,
            for every call.
        buffers: full tensors that every rank holds: token ids, labels, positions. They stay
            unchanged; the block gets this rank's rows of each.
        buffer_dims: of each buffer, its sequence dimension.
        buffer_seq_dims: the same, as in PyTorch's ``context_parallel``: the buffers themselves,
            such as ``model.rope_cache``, hold this rank's rows in the block, and all rows again
            after it, except for ``no_restore_buffers``.
        no_restore_buffers: buffers of ``buffer_seq_dims`` that keep this rank's rows.
        pad_values: fill rows beyond the sequence: one for all buffers, or one for each; None: a
            length that needs such rows is refused.
        seq_len: true global length (tokens); None is the length of the buffers or, without any,
            N * S.
        options: further keywords of ``ring_attention``, passed on as they are.

    Yields:
        tuple of Tensor: this rank's rows of each buffer, in their order.

    Raises:
        ValueError: buffers that do not fit, an unknown partition; in the block, on every rank of
            the ring, a call that cannot be routed (a mask, other lengths of queries and
            keys, reentrant checkpointing), or that hides its attention (``nn.MultiheadAttention``;
            FlexAttention, whose compiler wraps the error); at the end, a block without any call:
            the model attends by other means, and to this rank's rows only.
    """
    comm, in_place = connect(group), buffer_seq_dims is not None
    with refusing(comm):  # others go on to their first call in the block
        partitions.get(partition)
        if in_place and buffer_dims:
            raise ValueError("buffer_dims: got buffer_seq_dims too, expected one of both")
        dims = buffer_dims if buffer_seq_dims is None else buffer_seq_dims
        options |= {"cu_seqlens": cu_seqlens, "window": window}
        if partition == partitions.BALANCED:
            partition = _dealt(buffers, dims, seq_len, options, comm.world_size)
        length, shards = _shards(buffers, dims, pad_values, seq_len, partition, group)
    options |= {"group": group, "partition": partition, "transport": transport, "backend": backend}
    router = _Router(**options, blocks=blocks, seq_len=length)
    held = buffers if in_place else ()
    # A compiler traces what Python code calls, all of which the router sees.
    guard = nullcontext() if torch.compiler.is_compiling() else kernels_refuse()
    with _replaced(held, shards, no_restore_buffers), guard, router:
        yield tuple(buffers) if in_place else shards
    with refusing(comm):
        if not router.routed:
            raise ValueError(
                "context_parallel: got a block that never called scaled_dot_product_attention, "
                "expected a call: this model attends by other means, to this rank's rows only"
            )


def _dealt(
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    seq_len: int | None,
    options: dict[str, Any],
    ranks: int,
) -> Partitioning:
    """Returns the deal of a sequence for the mask of causal calls in the block."""
    lengths = [x.shape[plain(dim)] for x, dim in zip(buffers, dims, strict=False)]
    if seq_len is None and not lengths:
        raise ValueError(
            f"partition: got {partitions.BALANCED!r} without buffers and seq_len, expected one of "
            "them, or ringray.deal(...)"
        )
    names = "cu_seqlens", "window", "chunk", "prefix", "shared_prefix", "global_tokens"
    limits = {name: options[name] for name in names if name in options}
    return deal(lengths[0] if seq_len is None else seq_len, ranks, **limits)


def _shards(
    buffers: Sequence[Tensor],
    dims: Sequence[int],
    pad_values: float | Sequence[float] | None,
    seq_len: int | None,
    partition: Partitioning,
    group: RingGroup,
) -> tuple[int | None, tuple[Tensor, ...]]:
    """Returns the sequence length, if it is known, and this rank's rows of each buffer."""
    unpadded, pad_values = pad_values is None, plain(0 if pad_values is None else pad_values)
    seq_len, dims = plain(seq_len), [*map(plain, dims)]
    fills = [pad_values] * len(buffers) if isinstance(pad_values, int | float) else [*pad_values]
    for name, values in (("buffer_dims", dims), ("pad_values", fills)):
        if len(values) != len(buffers):
            raise ValueError(f"{name}: got {len(values)}, expected one for each of {len(buffers)}")
    for i, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(f"buffer_dims: got {dim} for shape {tuple(buffer.shape)}")
        seq_len = buffer.shape[dim] if seq_len is None else seq_len
        if buffer.shape[dim] != seq_len:
            raise ValueError(
                f"buffers: number {i} has {buffer.shape[dim]} rows in dimension {dim}, expected "
                f"the {seq_len} of the sequence; cut longer ones"
            )
        padded = partitions.padded_length(partition, seq_len, place_in(group)[1])
        if unpadded and padded != seq_len:
            raise ValueError(
                f"buffers: got {seq_len} rows, which {partition!r} fills up to {padded}, expected "
                "so many, or pad_values=..., a value for each buffer (-100 for labels)"
            )
    rows = tuple(
        shard(buffer, dim=dim, partition=partition, group=group, pad_value=fill)
        for buffer, dim, fill in zip(buffers, dims, fills, strict=True)
    )
    return seq_len, rows


@contextmanager
def _replaced(
    buffers: Sequence[Tensor], shards: Sequence[Tensor], not_restored: Iterable[Tensor]
) -> Iterator[None]:
    """Puts ``shards`` in the places of ``buffers``, and back."""
    for i, buffer in enumerate(buffers):
        if buffer.requires_grad:
            raise ValueError(f"buffers: number {i} requires a gradient, expected none in place")
    not_restored_ids = {id(x) for x in not_restored}
    if strange := not_restored_ids - {id(x) for x in buffers}:
        raise ValueError(f"no_restore_buffers: {len(strange)} of them are not in buffers")
    whole = [(x, x.data) for x in buffers if id(x) not in not_restored_ids]
    # Not by a copy into them: what autograd has saved of either stays.
    for buffer, rows in zip(buffers, shards, strict=False):
        buffer.data = rows
    try:
        yield
    finally:
        for buffer, rows in whole:
            buffer.data = rows


class _Router(TorchFunctionMode):
    """A mode that routes SDPA to ``ring_attention`` with ``arguments``. ``routed``: calls so
    far."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments
        self.routed = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ROUTED:
            self.routed += 1
            return self._route(SdpaCall(*args, **kwargs))
        if func is Tensor.unflatten:  # a method that Dynamo cannot trace inside of a mode
            return torch.unflatten(*args, **kwargs)
        if func in _BACKWARD:
            return self._backward(func, *args, **kwargs)
        if getattr(func, "__name__", None) in _OPAQUE or other_attention(func):
            with self._refusing():
                raise ValueError(
                    f"context_parallel: got a call of {getattr(func, '__name__', func)}, which "
                    "cannot be routed, expected scaled_dot_product_attention "
                    "(ringray.ContextParallelAttention is a module that can replace it)"
                )
        return func(*args, **kwargs)

    def _backward(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``func`` with this mode on; given edges of the graph, not tensors, it asks no
        mode."""
        arguments = inspect.signature(func).bind(*args, **kwargs).arguments
        if arguments.get("materialize_grads"):  # it needs the tensors
            return func(*args, **kwargs)
        if func is Tensor.backward:
            func = torch.autograd.backward
            arguments["tensors"] = arguments.pop("self")
            arguments["grad_tensors"] = arguments.pop("gradient", None)
        for name in ("tensors", "outputs", "inputs"):
            if arguments.get(name) is not None:
                arguments[name] = _edges(arguments[name])
        with self:
            return func(**arguments)

    def _refusing(self) -> AbstractContextManager[None]:
        """Tells the other ranks of an error, except of one that a compiler traces and wraps."""
        traced = torch.compiler.is_compiling()
        return nullcontext() if traced else refusing(connect(self.arguments["group"]))

    def _route(self, call: SdpaCall) -> Tensor:
        with self._refusing():
            _check(call)
        options = self.arguments | {
            "causal": call.is_causal,
            "scale": call.scale,
            "dropout_p": call.dropout_p,
        }
        out = cast("Tensor", ring_attention(*call[:3], **options))
        return cast("Tensor", _Marked.apply(out)) if out.requires_grad else out


def _check(call: SdpaCall) -> None:
    """Raises ValueError for calls that a ring cannot route; ``ring_attention`` checks the rest."""
    query, key = call.query, call.key
    says = "context_parallel: scaled_dot_product_attention got "
    if call.attn_mask is not None:
        raise ValueError(
            f"{says}attn_mask, expected none: is_causal, or window, cu_seqlens and seq_len of "
            "context_parallel, define the keys that a query sees"
        )
    if query.is_nested or query.dim() != 4:
        shape = "a nested tensor" if query.is_nested else tuple(query.shape)
        raise ValueError(f"{says}query {shape}, expected (B, H, S, D)")
    if key.dim() == 4 and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{says}{query.shape[2]} query rows and {key.shape[2]} key rows, expected as many: "
            "cross-attention and caches are not sharded like this"
        )
    if not call.enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{says}{query.shape[1]} query heads and {key.shape[1]} key heads, expected as many, "
            "or enable_gqa=True"
        )
    if not torch.is_grad_enabled() and _in_reentrant_checkpoint():
        raise ValueError(
            "context_parallel: got a layer checkpointed with use_reentrant=True, expected "
            "use_reentrant=False: a backward outside of the block would recompute the layer "
            "without the ring, and no check would detect it"
        )


def _in_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
    return False


# A compiler looks at the stack once, as it traces (see ``attention.compile``).
_in_reentrant_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _edges(tensors: Any) -> list[Any]:
    if isinstance(tensors, Tensor | GradientEdge):
        tensors = (tensors,)
    return [get_gradient_edge(x) if isinstance(x, Tensor) else x for x in tensors]


class _Marked(torch.autograd.Function):
    """The identity, which saves a tensor of a shape that no attention saves.

    Plain SDPA may save tensors of the same shapes as the ring. With this one, checkpointing always
    detects a layer that was recomputed without the ring, instead of using its result.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor) -> Tensor:
        ctx.save_for_backward(out.new_empty(0, dtype=torch.bool))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
