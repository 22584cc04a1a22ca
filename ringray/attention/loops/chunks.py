"""Chunks: rows that one rank owns and others compute with.

Shape legend: B batch, H heads, S rows, D head dim; rows are dimension 2 of every tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringray.traffic.walk import Rows


class Result(NamedTuple):
    """Result of a forward pass: out (B, Hq, S, D) in q's dtype, lse fp32 (B, Hq, S), and the
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
        """Returns views of some of the rows, or the tensors where that is all of them."""
        if rows == self.rows:
            return self.tensors
        if rows.runs:  # only of a whole shard, which begins with row 0
            return tuple(torch.cat([x[:, :, run] for run in rows.parts], 2) for x in self.tensors)
        part = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        return tuple(x[:, :, part] for x in self.tensors)

    def add(self, other: Chunk) -> None:
        """Adds the rows of ``other``, which are some of these."""
        # The rows of ``other`` lie together, run after run; here they are apart.
        runs = other.rows.parts
        for run, *parts in zip(runs, *(_split(x, runs) for x in other.tensors), strict=True):
            for into, x in zip(self.cut(Rows(run.start, run.stop)), parts, strict=True):
                into += x


def _split(x: Tensor, runs: tuple[slice, ...]) -> tuple[Tensor, ...]:
    return x.split([run.stop - run.start for run in runs], 2)


class ChunkShape(NamedTuple):
    """Shapes and dtypes of a chunk's tensors: as ``like`` except for the rows. ``dtype``: of all
    tensors; None is that of each in ``like``."""

    like: tuple[Tensor, ...]
    dtype: torch.dtype | None = None

    def empty(self, rows: Rows) -> Chunk:
        """Makes a chunk to receive into."""
        return Chunk(tuple(self._one(x, rows) for x in self.like), rows)

    def zeros(self, rows: Rows) -> Chunk:
        """Makes a chunk to add to."""
        return Chunk(tuple(self._one(x, rows).zero_() for x in self.like), rows)

    def _one(self, x: Tensor, rows: Rows) -> Tensor:
        shape = (*x.shape[:2], rows.size, *x.shape[3:])
        return torch.empty(shape, dtype=self.dtype or x.dtype, device=x.device)
