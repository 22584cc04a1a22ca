"""Sharding: a sequence dealt to the ranks of a ring, and put together again.

``shard`` and ``unshard`` are inverse to each other and differentiable; ``local_positions`` gives
the token of each local row, for RoPE, masks and losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from ringray import partition as partitions
from ringray.attention.agreement import BACKWARD, AgreedCall, agree, refusing
from ringray.attention.compile import operator
from ringray.attention.deal import heard, spoken
from ringray.attention.problem import positions
from ringray.base.units import plain
from ringray.comm.ring import Comm, RingGroup, connect, connect_named, name_of, place_in
from ringray.partition import Partitioning
from ringray.traffic.geometry import Layout
from ringray_kernels.checks import not_plain


def local_positions(partition: Partitioning, seq_len: int, world_size: int, rank: int) -> Tensor:
    """Returns the global positions of a rank's rows.

    Args:
        partition: a name of ``ringray.partition.PARTITIONS``, or what ``ringray.deal`` returns.
        seq_len: true global length (tokens); it is padded to the next length the partition deals.
        world_size, rank: of the ring.

    Returns:
        int64 (S' / N,), strictly increasing; entries of at least ``seq_len`` are padding.

    Raises:
        ValueError: unknown partition, empty sequence, or a rank outside the ring.
    """
    partitions.get(partition)
    seq_len, world_size, rank = plain(seq_len), plain(world_size), plain(rank)
    if type(seq_len) is not int or seq_len < 1:
        raise ValueError(f"seq_len: got {seq_len!r}, expected an integer of at least 1")
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size: got {world_size!r}, expected an integer of at least 1")
    if type(rank) is not int or not 0 <= rank < world_size:
        raise ValueError(f"rank: got {rank!r}, expected 0 to {world_size - 1}")
    padded = partitions.padded_length(partition, seq_len, world_size)
    return _positions_on("cpu", partition, padded, world_size, rank).clone()


def shard(
    x: Tensor,
    *,
    dim: int,
    partition: Partitioning = partitions.DEFAULT,
    group: RingGroup = None,
    pad_value: float = 0,
) -> Tensor:
    """Returns this rank's rows of a full tensor that every rank holds.

    Args:
        x: any shape and dtype; ``dim`` is the sequence.
        partition: a name of ``ringray.partition.PARTITIONS``, or what ``ringray.deal`` returns.
        group: process group of the ring; as in ``ring_attention``.
        pad_value: fills rows beyond the sequence, where it does not divide evenly.

    Returns:
        x with ``dim`` of S' / N rows, which remembers the length of x where it is padded: eager
        calls of ``ring_attention`` and ``unshard`` with this very tensor need no ``seq_len``. Its
        gradient is this rank's rows, and zeros elsewhere.

    Raises:
        ValueError: unknown partition, no such dimension, a tensor that is not plain and dense, or a
            ``pad_value`` that its dtype cannot hold, with padding or without.
    """
    dim, pad_value = _dimension(x, dim), plain(pad_value)
    if not holds(x.dtype, pad_value):
        raise ValueError(f"pad_value: got {pad_value!r}, which {x.dtype} cannot hold")
    rank, ranks = place_in(group)
    mine = _take(x, dim, partition, rank, ranks, pad_value)
    return remember(mine, x.shape[dim], mine.shape[dim] * ranks)


def unshard(
    x: Tensor,
    *,
    dim: int,
    partition: Partitioning = partitions.DEFAULT,
    group: RingGroup = None,
    seq_len: int | None = None,
    gradients: str = "sum",
) -> Tensor:
    """Returns the full tensor on every rank, from the shards of all: the inverse of ``shard``.

    Args:
        x: this rank's shard; ``dim`` is the sequence. All ranks pass the same shape.
        partition, group: as in ``shard``.
        seq_len: true global length (tokens), to drop padding; None is the length that x remembers
            from ``shard`` or ``ring_attention``, else that of a deal, else all N * S rows.
        gradients: ``sum``: each rank computes its own part of the loss from the result. ``mean``:
            every rank computes the whole loss, whose gradient a sum would have N times.

    Returns:
        x with ``dim`` of ``seq_len`` rows. Its gradient is summed over all ranks, or averaged, own
        rows returned.

    Raises:
        ValueError: unknown partition, no such dimension, a tensor that is not plain and dense, a
            length these shards cannot have, or ranks that disagree; on every rank.
    """
    name, (_, ranks), dim, length = name_of(group), place_in(group), plain(dim), plain(seq_len)
    # While compiling, the operator checks: others may run theirs already.
    comm = None if torch.compiler.is_compiling() else connect(group)
    with nullcontext() if comm is None else refusing(comm, once=True):
        if comm is not None:
            length = remembered(x) if length is None else length
            dim, length = checked(x, comm, dim, partition, length, gradients)
        elif length is None:
            length = partitions.dealt_length(partition)
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        rule = spoken(partition)
        full, _ = _unshard(x, dim, *rule, name, ranks, length, gradients, needs_grad)
        return cast("Tensor", full)


def checked(
    x: Tensor,
    comm: Comm,
    dim: int,
    partition: Partitioning,
    length: int | None,
    gradients: str = "sum",
) -> tuple[int, int]:
    """Returns the dimension and the true length of a shard."""
    if gradients not in ("sum", "mean"):
        raise ValueError(f"gradients: got {gradients!r}, expected 'sum' or 'mean'")
    dim = _dimension(x, dim)
    if is_batchedtensor(x):  # it would send once for each entry
        raise ValueError("x: got a tensor of torch.vmap, expected a call outside of it")
    comm.check(x.device, staged=False, collective=True)
    return dim, partitions.true_length(partition, length, x.shape[dim], comm.world_size)


def holds(dtype: torch.dtype, value: object) -> bool:
    """Tells whether a dtype can hold a number, rounded where it has a fraction."""
    if not isinstance(value, int | float):
        return isinstance(value, complex) and dtype.is_complex
    if dtype.is_floating_point or dtype.is_complex:
        return not torch.finfo(dtype).max < abs(value) < math.inf  # NaN and infinity, too
    if dtype is torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max and float(value).is_integer()


def remember(x: Tensor, length: int, padded: int) -> Tensor:
    """Returns ``x``, which remembers the true length of a sequence that is padded."""
    if length < padded and not torch.compiler.is_compiling():
        x._ringray_seq_len = length, id(x), _writes(x)  # type: ignore[attr-defined]
    return x


def _writes(x: Tensor) -> int:
    """Counts the changes of a tensor in place; those of inference mode are not counted."""
    return 0 if x.is_inference() else x._version


def remembered(*tensors: Tensor) -> int | None:
    """Returns the true length that shards remember, or None.

    Raises:
        ValueError: they remember different lengths, or one has been changed in place since.
    """
    if torch.compiler.is_compiling():
        return None
    lengths = set()
    for x in tensors:
        length, owner, writes = getattr(x, "_ringray_seq_len", (None, 0, 0))
        if owner == id(x) and writes != _writes(x):  # a copy has an id and a count of its own
            raise ValueError(
                f"seq_len: got None for a shard of {length} rows and padding that was changed in "
                "place, expected the length of the sequence that it holds now"
            )
        lengths |= set() if length is None else {length}
    if len(lengths) > 1:
        raise ValueError(f"seq_len: got shards of sequences of {sorted(lengths)} rows")
    return lengths.pop() if lengths else None


def _dimension(x: Tensor, dim: int) -> int:
    dim = plain(dim)
    if not isinstance(x, Tensor) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"dim: got {dim!r} for {shape}, expected a dimension of the tensor")
    if not torch.compiler.is_compiling() and (reason := not_plain(x)):
        raise ValueError(f"x: got {reason}")
    if x.shape[dim] == 0:
        raise ValueError(f"dim: the sequence dimension {dim} of {tuple(x.shape)} is empty")
    return dim % x.dim()


def _take(
    x: Tensor, dim: int, partition: Partitioning, rank: int, ranks: int, pad_value: float
) -> Tensor:
    """Returns a rank's rows of x, with rows beyond x filled with ``pad_value``."""
    length = x.shape[dim]
    padded = partitions.padded_length(partition, length, ranks)
    rows = _positions_on(x.device, partition, padded, ranks, rank)
    if padded == length:
        return x.index_select(dim, rows)
    mine = x.index_select(dim, rows.clamp(max=length - 1))
    beyond = (rows >= length).reshape(-1, *[1] * (x.dim() - 1 - dim))
    return mine.where(~beyond, mine.new_full((), pad_value))  # of any dtype, as 8-bit floats


def _positions_on(
    device: torch.device | str, partition: Partitioning, padded: int, ranks: int, rank: int
) -> Tensor:
    """Returns the positions of a rank's rows; not to be changed, except while compiling."""
    if torch.compiler.is_compiling():
        return traced_positions(*spoken(partition), padded, ranks, rank).to(device)
    return positions(Layout(partition, padded, ranks), rank, torch.device(device))


# Operators, opaque to torch.compile; see ``attention.compile``. ``group``: by its name.

_RING = "SymInt dim, str partition, Tensor? dealt, str? group, int ranks"


@operator(
    "refuse(str why, Tensor[] values, str? group, int ranks) -> Tensor",
    fake=lambda *_: torch.empty((), dtype=torch.float32, device="cpu"),
)
def refuse(why: str, values: Sequence[Tensor], group: str | None, ranks: int) -> Tensor:
    """Raises the ValueError of a rank that compiles, when the graph runs, on every rank. ``why``:
    with {} for each of the ``values``."""
    with refusing(connect_named(group, ranks)):
        raise ValueError(mistaken(why, values))


def mistaken(why: str, values: Sequence[Any]) -> str:
    """Returns ``why`` with the dtypes and shapes of ``values`` in the places of {}."""
    return why.format(*(f"{x.dtype} of shape {tuple(x.shape)}" for x in values))


def _rows(x: Tensor, dim: int, rows: int) -> Tensor:
    """Makes an empty tensor like ``x`` with other rows."""
    return x.new_empty((*x.shape[:dim], rows, *x.shape[dim + 1 :]))


@operator(
    "positions(str partition, Tensor? dealt, SymInt padded, SymInt ranks, SymInt rank) -> Tensor",
    fake=lambda _, __, padded, ranks, rank: torch.empty(
        padded // ranks, dtype=torch.int64, device="cpu"
    ),
)
def traced_positions(
    partition: str, dealt: Tensor | None, padded: int, ranks: int, rank: int
) -> Tensor:
    """Returns the positions of a rank's rows, for code that is compiled."""
    layout = Layout(heard(partition, dealt), padded, ranks)
    return positions(layout, rank, torch.device("cpu")).clone()


def _like_full(
    x: Tensor,
    dim: int,
    partition: str,
    dealt: Tensor | None,
    group: str | None,
    ranks: int,
    length: int | None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    call = torch.empty((), dtype=torch.int64, device="cpu")
    if not -x.dim() <= dim < x.dim():  # the operator refuses it
        return torch.empty_like(x), call
    return _rows(x, dim % x.dim(), x.shape[dim] * ranks if length is None else length), call


@operator(
    f"unshard(Tensor x, {_RING}, SymInt? length, str gradients, bool needs_grad) "
    "-> (Tensor full, Tensor call)",
    fake=_like_full,
)
def _unshard(
    x: Tensor,
    dim: int,
    name: str,
    dealt: Tensor | None,
    group: str | None,
    ranks: int,
    length: int | None,
    gradients: str,
    needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    comm, partition = connect_named(group, ranks), heard(name, dealt)
    with refusing(comm):
        dim, length = checked(x, comm, dim, partition, length, gradients)
        padded = x.shape[dim] * ranks
        # Memory that is short is short before other ranks wait.
        mine, full = x.contiguous(), _rows(x, dim, padded)
        parts = [torch.empty_like(mine) for _ in range(ranks)]
        places = [positions(Layout(partition, padded, ranks), i, x.device) for i in range(ranks)]
        agreed = AgreedCall(
            "unshard",
            rows_per_rank=x.shape[dim],
            shape=tuple(x.shape),
            dtype=x.dtype,
            dim=dim,
            partition=partition,
            seq_len=length,
            gradients=gradients,
            requires_grad=needs_grad,
        )
        call = torch.tensor(agree(comm, agreed), dtype=torch.int64, device="cpu")
    comm.gather(parts, mine, "unshard")
    for rows, part in zip(places, parts, strict=True):
        full.index_copy_(dim, rows, part)
    return full.narrow(dim, 0, length).clone() if length < padded else full, call


@operator(
    f"unshard_backward(Tensor grad, Tensor call, {_RING}, bool mean) -> Tensor",
    fake=lambda grad, call, dim, partition, dealt, group, ranks, mean: _rows(
        grad, dim, partitions.padded_length(partition, grad.shape[dim], ranks) // ranks
    ),
)
def _unshard_backward(
    grad: Tensor,
    call: Tensor,
    dim: int,
    partition: str,
    dealt: Tensor | None,
    group: str | None,
    ranks: int,
    mean: bool,
) -> Tensor:
    comm = connect_named(group, ranks)
    with refusing(comm):
        total = grad.contiguous().clone()
        agree(comm, AgreedCall(BACKWARD, call=int(call)))
    comm.sum(total, "backward of unshard")
    total = total / ranks if mean else total
    return _take(total, dim, heard(partition, dealt), comm.rank, ranks, 0).contiguous()


def _setup_unshard(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, dim, partition, dealt, *ring, _, gradients, _ = inputs
    ctx.place, ctx.ring = (dim % x.dim(), partition), (*ring, gradients == "mean")
    ctx.save_for_backward(output[1], dealt)
    ctx.mark_non_differentiable(output[1])


def _backward_unshard(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    call, dealt = ctx.saved_tensors
    return _unshard_backward(grad, call, *ctx.place, dealt, *ctx.ring), *[None] * 8


_unshard.register_autograd(_backward_unshard, setup_context=_setup_unshard)
