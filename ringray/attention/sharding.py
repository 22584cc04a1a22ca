"""Sharding: a sequence dealt to the ranks of a ring, and put together again.

``shard`` and ``unshard`` are inverse to each other and differentiable; ``local_positions`` gives
the token of each local row, for RoPE, masks and losses.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ringray import partition as partitions
from ringray.attention.compile import operator
from ringray.attention.problem import positions
from ringray.comm.ring import connect_named, name_of, place_in
from ringray.traffic.geometry import Layout


def local_positions(partition: str, seq_len: int, world_size: int, rank: int) -> Tensor:
    """Returns the global positions of a rank's rows.

    Args:
        partition: a name of ``ringray.partition.PARTITIONS``.
        seq_len: true global length (tokens); it is padded to the next length the partition deals.
        world_size, rank: of the ring.

    Returns:
        int64 (S' / N,), strictly increasing; entries of at least ``seq_len`` are padding.

    Raises:
        ValueError: unknown partition, empty sequence, or a rank outside the ring.
    """
    partitions.get(partition)
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
    partition: str = partitions.DEFAULT,
    group: dist.ProcessGroup | None = None,
    pad_value: float = 0,
) -> Tensor:
    """Returns this rank's rows of a full tensor that every rank holds.

    Args:
        x: any shape and dtype; ``dim`` is the sequence.
        partition: a name of ``ringray.partition.PARTITIONS``.
        group: process group of the ring; as in ``ring_attention``.
        pad_value: fills rows beyond the sequence, where it does not divide evenly.

    Returns:
        x with ``dim`` of S' / N rows. Its gradient is this rank's rows, and zeros elsewhere.

    Raises:
        ValueError: unknown partition, or no such dimension.
    """
    dim = _dimension(x, dim)
    if not x.is_floating_point() and not float(pad_value).is_integer():
        raise ValueError(f"pad_value: got {pad_value!r}, which {x.dtype} cannot hold")
    rank, ranks = place_in(group)
    return _take(x, dim, partition, rank, ranks, pad_value)


def unshard(
    x: Tensor,
    *,
    dim: int,
    partition: str = partitions.DEFAULT,
    group: dist.ProcessGroup | None = None,
    seq_len: int | None = None,
) -> Tensor:
    """Returns the full tensor on every rank, from the shards of all: the inverse of ``shard``.

    Args:
        x: this rank's shard; ``dim`` is the sequence. All ranks pass the same shape.
        partition, group: as in ``shard``.
        seq_len: true global length (tokens), to drop padding; None keeps all N * S rows.

    Returns:
        x with ``dim`` of ``seq_len`` rows. Its gradient is summed over all ranks, own rows
        returned.

    Raises:
        ValueError: unknown partition, no such dimension, or a length these shards cannot have.
    """
    dim = _dimension(x, dim)
    _, ranks = place_in(group)
    length = partitions.true_length(partition, seq_len, x.shape[dim], ranks)
    return cast("Tensor", _unshard(x, dim, partition, name_of(group), ranks, length))


def _dimension(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"dim: got {dim!r} for {shape}, expected a dimension of the tensor")
    if x.shape[dim] == 0:
        raise ValueError(f"dim: the sequence dimension {dim} of {tuple(x.shape)} is empty")
    return dim % x.dim()


def _take(x: Tensor, dim: int, partition: str, rank: int, ranks: int, pad_value: float) -> Tensor:
    """Returns a rank's rows of x, with rows beyond x filled with ``pad_value``."""
    length = x.shape[dim]
    padded = partitions.padded_length(partition, length, ranks)
    rows = _positions_on(x.device, partition, padded, ranks, rank)
    if padded == length:
        return x.index_select(dim, rows)
    mine = x.index_select(dim, rows.clamp(max=length - 1))
    beyond = (rows >= length).reshape(-1, *[1] * (x.dim() - 1 - dim))
    return mine.masked_fill(beyond, pad_value if x.is_floating_point() else int(pad_value))


def _positions_on(
    device: torch.device | str, partition: str, padded: int, ranks: int, rank: int
) -> Tensor:
    """Returns the positions of a rank's rows; not to be changed, except while compiling."""
    if torch.compiler.is_compiling():
        return _positions(partition, padded, ranks, rank).to(device)
    return positions(Layout(partition, padded, ranks), rank, torch.device(device))


# Operators, opaque to torch.compile; see ``attention.compile``. ``group``: by its name.

_RING = "SymInt dim, str partition, str? group, int ranks"


def _rows(x: Tensor, dim: int, rows: int) -> Tensor:
    """Makes an empty tensor like ``x`` with other rows."""
    return x.new_empty((*x.shape[:dim], rows, *x.shape[dim + 1 :]))


@operator(
    "positions(str partition, SymInt padded, SymInt ranks, SymInt rank) -> Tensor",
    fake=lambda _, padded, ranks, rank: torch.empty(padded // ranks, dtype=torch.int64),
)
def _positions(partition: str, padded: int, ranks: int, rank: int) -> Tensor:
    return positions(Layout(partition, padded, ranks), rank, torch.device("cpu")).clone()


@operator(
    f"unshard(Tensor x, {_RING}, SymInt length) -> Tensor",
    fake=lambda x, dim, partition, group, ranks, length: _rows(x, dim, length),
)
def _unshard(
    x: Tensor, dim: int, partition: str, group: str | None, ranks: int, length: int
) -> Tensor:
    padded = x.shape[dim] * ranks
    full, layout = _rows(x, dim, padded), Layout(partition, padded, ranks)
    for rank, part in enumerate(connect_named(group, ranks).gather(x)):
        full.index_copy_(dim, positions(layout, rank, x.device), part)
    return full.narrow(dim, 0, length).clone() if length < padded else full


@operator(
    f"unshard_backward(Tensor grad, {_RING}) -> Tensor",
    fake=lambda grad, dim, partition, group, ranks: _rows(
        grad, dim, partitions.padded_length(partition, grad.shape[dim], ranks) // ranks
    ),
)
def _unshard_backward(
    grad: Tensor, dim: int, partition: str, group: str | None, ranks: int
) -> Tensor:
    comm, total = connect_named(group, ranks), grad.contiguous().clone()
    comm.sum(total)
    return _take(total, dim, partition, comm.rank, ranks, 0).contiguous()


def _setup_unshard(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.problem, _ = inputs


_unshard.register_autograd(
    lambda ctx, grad: (_unshard_backward(grad, *ctx.problem), *[None] * 5),
    setup_context=_setup_unshard,
)
