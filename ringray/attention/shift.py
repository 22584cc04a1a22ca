"""``shift``: each row of a sharded sequence gets the row of a token some places on.

Labels of the next tokens, and the embeddings of multi-token heads, need rows beyond a shard's edges
(a halo). Ranks exchange these rows alone, in one batch of messages. Row i needs row j forwards if j
needs i backwards, so the same tables tell what to send, what to receive, and the gradient.

Shape legend: B batch, R rows of one shard.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ringray import partition as partitions
from ringray.attention.agreement import BACKWARD, AgreedCall, agree, refusing
from ringray.attention.compile import operator
from ringray.attention.deal import heard, spoken
from ringray.attention.documents import boundaries, document_boundaries
from ringray.attention.problem import positions
from ringray.attention.sharding import checked, holds, remember, remembered
from ringray.base.units import plain
from ringray.comm.batch import Batch
from ringray.comm.ring import (
    Comm,
    RingGroup,
    connect,
    connect_named,
    name_of,
    place_in,
)
from ringray.partition import Partitioning
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask
from ringray_kernels.modes import lasting

_Bounds = tuple[tuple[int, ...], ...]  # of documents, for all batch rows or for each


def shift(
    x: Tensor,
    by: int,
    *,
    dim: int,
    partition: Partitioning = partitions.DEFAULT,
    group: RingGroup = None,
    seq_len: int | None = None,
    cu_seqlens: Any = None,
    fill: complex = 0,
) -> Tensor:
    """Returns a shard in which the row at position p is the row of position p + ``by``.

    Each rank sends only the rows that another one needs: ``by`` rows to a neighbour where shards
    are contiguous, all of them where they are striped. All ranks call it together.

    Args:
        x: this rank's shard, any shape and dtype; ``dim`` is the sequence.
        by: tokens, of either sign; it may be larger than a shard, or than the sequence.
        partition, group: as in ``shard``.
        seq_len: as in ``unshard``.
        cu_seqlens: boundaries of packed documents, as in ``ring_attention``; those of each batch
            row (the first dimension of x) as well. None: the sequence is one document.
        fill: value of rows whose p + ``by`` is outside of p's document, and of padding.

    Returns:
        x's shape and dtype. Its gradient is the shift back, filled with 0, as is that one's.

    Raises:
        ValueError: on every rank, what ``unshard`` refuses, a ``by`` that is no integer, a ``fill``
            that the dtype cannot hold, boundaries that do not fit, or ranks that disagree.
    """
    name, (_, ranks) = name_of(group), place_in(group)
    dim, by, length, fill = plain(dim), plain(by), plain(seq_len), plain(fill)
    bounds = boundaries(cu_seqlens)
    # While compiling, the operator checks: others may run theirs already.
    comm = None if torch.compiler.is_compiling() else connect(group)
    with nullcontext() if comm is None else refusing(comm, once=True):
        if comm is not None:
            length = remembered(x) if length is None else length
            problem = _problem(x, comm, fill, by, dim, partition, length, bounds)
            by, length = problem.by, problem.length  # an operator takes 64 bits
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        place = by, dim, *spoken(partition), name, ranks, length, bounds
        shifted = cast("Tensor", _shift(x, None, needs_grad, fill, *place)[0])
        return shifted if comm is None else remember(shifted, length, x.shape[dim] * ranks)


class _ShiftProblem(NamedTuple):
    """A checked shift. ``length``: of the sequence, without padding (tokens)."""

    by: int
    dim: int
    layout: Layout
    length: int
    bounds: _Bounds


def _problem(
    x: Tensor, comm: Comm, fill: Any, by: int, dim: int, partition: Partitioning, *sequence: Any
) -> _ShiftProblem:
    """Returns the shift of these arguments, ``sequence``: its length and the boundaries of its
    documents; raises ValueError if they do not fit."""
    length, cu_seqlens = sequence
    if type(by) is not int:
        raise ValueError(f"by: got {by!r}, expected an integer number of tokens")
    dim, length = checked(x, comm, dim, partition, length)
    if not holds(x.dtype, fill):
        raise ValueError(f"fill: got {fill!r}, which {x.dtype} cannot hold")
    comm.check(x.device, staged=False)  # of messages, beside that of collectives
    documents = document_boundaries(cu_seqlens, len(x) if dim else 1)
    Mask(length, documents=documents)  # checks them
    # Beyond the sequence every shift is the same.
    by, bounds = max(-length, min(by, length)), documents or (0, length)
    rows = bounds if isinstance(bounds[0], tuple) else (bounds,)
    layout = Layout(partition, x.shape[dim] * comm.world_size, comm.world_size)
    return _ShiftProblem(by, dim, layout, length, rows)


@lru_cache(maxsize=64)
def _partners(problem: _ShiftProblem, rank: int, device: torch.device) -> tuple[Tensor, ...]:
    """Returns for each rank the numbers of ``rank``'s rows whose token ``by`` places on is on that
    rank and in their document: ascending, those of all batch rows where each has documents of its
    own."""
    (by, _, layout, length, bounds), cpu = problem, torch.device("cpu")
    with lasting(device):
        edges = torch.tensor(bounds, dtype=torch.int64, device=cpu)
        own = positions(layout, rank, cpu)
        here, there = (
            torch.searchsorted(edges, tokens.repeat(len(edges), 1), right=True)
            for tokens in (own, own + by)
        )
        same = (here == there) & (own < length)  # padding is behind the last edge, as is its sum
        return tuple(
            (same & torch.isin(own + by, positions(layout, other, cpu)))
            .flatten()
            .nonzero()
            .flatten()
            .to(device)
            for other in range(layout.ranks)
        )


class _Exchange:
    """The messages of one shift and the place of its result, made before any rank waits."""

    def __init__(self, x: Tensor, problem: _ShiftProblem, comm: Comm, fill: complex) -> None:
        self._comm, self._problem = comm, problem
        back = problem._replace(by=-problem.by)
        wanted, held = (_partners(way, comm.rank, x.device) for way in (problem, back))
        # Rows first, or those of all batch rows, which need different ones of each other.
        self._front = int(len(problem.bounds) > 1)
        moved = x.movedim(problem.dim, self._front)
        self._shape, rows = moved.shape, moved.flatten(0, self._front)
        self._out = rows.new_full(rows.shape, fill)
        self._out[wanted[comm.rank]] = rows.index_select(0, held[comm.rank])
        self._batch, self._arriving = Batch("shift", f"rows {problem.by} places on"), []
        for other in range(comm.world_size):
            if other != comm.rank and len(held[other]):
                self._batch.send(_bytes(rows.index_select(0, held[other])), other)
            if other != comm.rank and len(wanted[other]):
                room = rows.new_empty((len(wanted[other]), *rows.shape[1:]))
                self._batch.receive(_bytes(room), other)
                self._arriving.append((wanted[other], room))

    def run(self) -> Tensor:
        """Returns the shifted shard."""
        self._comm.open(self._out.device)
        self._comm.post(self._batch).wait()
        for rows, arrived in self._arriving:
            self._out[rows] = arrived
        return self._out.view(self._shape).movedim(self._front, self._problem.dim).contiguous()


def _bytes(rows: Tensor) -> Tensor:
    """Returns the memory of contiguous rows: backends send no 16-bit integers."""
    return rows.view(-1).view(torch.uint8)


# An operator, opaque to torch.compile; see ``attention.compile``. ``group``: by its name;
# ``of_call``: the number of the call that this is the backward pass of. Its gradient is itself.


@operator(
    "shift(Tensor x, Tensor? of_call, bool needs_grad, Scalar fill, SymInt by, SymInt dim, "
    "str partition, Tensor? dealt, str? group, int ranks, SymInt? length, Tensor? cu_seqlens) "
    "-> (Tensor shifted, Tensor call)",
    fake=lambda x, *_: (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty((), dtype=torch.int64, device="cpu"),
    ),
)
def _shift(
    x: Tensor, of_call: Tensor | None, needs_grad: bool, fill: complex, *place: Any
) -> tuple[Tensor, Tensor]:
    by, dim, name, dealt, group, ranks, *sequence = place
    comm = connect_named(group, ranks)
    with refusing(comm):
        partition = heard(name, dealt)
        problem = _problem(x, comm, fill, by, dim, partition, *sequence)
        exchange = _Exchange(x, problem, comm, fill)
        agreed = AgreedCall(BACKWARD, call=0 if of_call is None else int(of_call))
        if of_call is None:
            values = {"by": by, "shape": tuple(x.shape), "dtype": x.dtype, "dim": problem.dim}
            values |= {"partition": partition, "seq_len": problem.length}
            values |= {"cu_seqlens": problem.bounds, "requires_grad": needs_grad}
            # As x holds it: 0 is 0.0, and False.
            held = torch.full((), fill, dtype=x.dtype, device="cpu").item()
            agreed = AgreedCall("shift", **values, fill=held)
        call = torch.tensor(agree(comm, agreed), dtype=torch.int64, device="cpu")
    return exchange.run(), call


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *_, by, dim, name, dealt, group, ranks, length, cu_seqlens = inputs
    ctx.place, ctx.ring = (-by, dim, name), (group, ranks, length)
    ctx.save_for_backward(output[1], dealt, cu_seqlens)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    call, dealt, cu_seqlens = ctx.saved_tensors
    back, _ = _shift(grad, call, False, 0, *ctx.place, dealt, *ctx.ring, cu_seqlens)
    return back, *[None] * 11


_shift.register_autograd(_backward, setup_context=_setup)
