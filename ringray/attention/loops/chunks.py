"""Chunks: rows that one rank owns and others compute with, and their way through the messages.

Shape legend: B batch, H heads, S rows, D head dim; rows are dimension 2 of every tensor.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ringray.comm.ring import Batch, Comm, Pending
from ringray.traffic.script import Message
from ringray.traffic.walk import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence


class Result(NamedTuple):
    """What a forward pass returns: out (B, Hq, S, D) in q's dtype, lse fp32 (B, Hq, S), and the
    tensors that its backward pass needs."""

    out: Tensor
    lse: Tensor
    saved: tuple[Tensor, ...]


@dataclass(frozen=True)
class Chunk:
    """Rows of one owner's tensors, such as its K and V."""

    tensors: tuple[Tensor, ...]
    rows: Rows

    def cut(self, rows: Rows) -> tuple[Tensor, ...]:
        """Views of some of the rows."""
        part = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        return tuple(x[:, :, part] for x in self.tensors)

    def add(self, other: Chunk) -> None:
        """Add the rows of ``other``, which are some of these."""
        for into, x in zip(self.cut(other.rows), other.tensors, strict=True):
            into += x


class ChunkShape(NamedTuple):
    """Shapes and types of a chunk's tensors: like ``like`` but for the rows."""

    like: tuple[Tensor, ...]
    dtype: torch.dtype | None = None  # None: of each tensor itself

    def empty(self, rows: Rows) -> Chunk:
        """A chunk to receive into."""
        return Chunk(tuple(self._one(x, rows) for x in self.like), rows)

    def zeros(self, rows: Rows) -> Chunk:
        """A chunk to add to."""
        return Chunk(tuple(self._one(x, rows).zero_() for x in self.like), rows)

    def _one(self, x: Tensor, rows: Rows) -> Tensor:
        shape = (*x.shape[:2], rows.size, *x.shape[3:])
        return torch.empty(shape, dtype=self.dtype or x.dtype, device=x.device)


class InFlight:
    """The chunks at this rank while a script is executed, and the messages under way.

    ``held``: chunks by owner, this rank's own among them. ``sums``: of gradients, made here and not
    yet sent. ``home``: where sums of this rank's own gradients are added when they come.
    """

    def __init__(
        self, comm: Comm, rank: int, own: Chunk, chunk: ChunkShape, total: ChunkShape | None = None
    ) -> None:
        self._comm, self._rank = comm, rank
        self._chunk, self._total = chunk, total
        self.held: dict[int, Chunk] = {rank: own}
        self.sums: dict[int, Chunk] = {}
        self.home: Chunk | None = total.zeros(own.rows) if total is not None else None
        self._pending: defaultdict[int, list[tuple[Pending, list[tuple[int, Chunk]]]]] = (
            defaultdict(list)
        )

    def zeros(self, rows: Rows) -> Chunk:
        """A sum to add gradients to."""
        assert self._total is not None
        return self._total.zeros(rows)

    def begin(self, step: int, messages: Sequence[Message]) -> None:
        """Start the transfers of one step; one batch for those that end together."""
        for due, group in itertools.groupby(messages, lambda message: message.due):
            together = list(group)
            batch = Batch(self._comm.hop(f"step {step}"), ", ".join(map(_said, together)))
            arriving = list[tuple[int, Chunk]]()
            for message in together:
                if message.send:
                    source = self.held if message.chunk else self.sums
                    for x in source[message.owner].cut(message.rows):
                        batch.send(x.contiguous(), message.peer)
                    if not message.chunk:
                        del self.sums[message.owner]  # the batch keeps it until it is sent
                else:
                    kind = self._chunk if message.chunk else self._total
                    assert kind is not None
                    chunk = kind.empty(message.rows)
                    for x in chunk.tensors:
                        batch.receive(x, message.peer)
                    if message.chunk:
                        self.held[message.owner] = chunk
                    else:
                        arriving.append((message.owner, chunk))
            self._pending[due].append((self._comm.post(batch), arriving))

    def end(self, step: int, visited: Sequence[int] = ()) -> None:
        """Wait for the transfers due at ``step`` and let go of the chunks that were ``visited``."""
        for pending, arriving in self._pending.pop(step, ()):
            pending.wait()
            for owner, part in arriving:
                into = self.home if owner == self._rank else self.sums[owner]
                assert into is not None
                into.add(part)
        for owner in visited:
            if owner != self._rank:
                del self.held[owner]

    def finish(self) -> None:
        """Wait for what is still under way: transfers to ranks that take them later."""
        for step in sorted(self._pending):
            self.end(step)


def _said(message: Message) -> str:
    """``chunk 2 to 3``, ``sum 0 from 1``: ranks of the ring in which chunks walk."""
    what, way = "chunk" if message.chunk else "sum", "to" if message.send else "from"
    return f"{what} {message.owner} {way} {message.peer}"
