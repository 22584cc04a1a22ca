"""Biases of scores: functions of the global positions of a query and a key, or values of pairs.

Distances are integers, so neither sharding nor rounding changes a bias.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringray_kernels.checks import expect

# Below any score, and finite: what stands for the log-sum-exp of a row whose biases are all -inf,
# so that its weights are 0 and not exp(-inf + inf).
LEAST_LSE = -1e30


class Bias(NamedTuple):
    """The bias of one hop. ``queries`` (Sq,), ``keys`` (Sk,): global positions, int32, increasing.

    ``values``, fp32: slopes (B or 1, Hq), of which head h adds -slope_h * |i - j| to the score of
    positions i and j (ALiBi, Press et al., 2022); or tables (1, Hq, 2 R + 1), of which it adds
    table_h[clamp(j - i, -R, R) + R]; or pairs (B or 1, Hq or 1, rows, S), of any dtype, of which it
    adds element [i, j] for row i (``queries`` are numbers of rows) and position j. ``grad``: for
    tables and pairs in backward fp32 like values, to be added to; for pairs with their strides.
    ``entries``: batch entry and heads of each entry of scores, if they are some of all.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    grad: Tensor | None = None
    entries: tuple[tuple[int, slice], ...] = ()

    @classmethod
    def of_hop(
        cls,
        positions: Tensor,
        rows: slice,
        keys: Tensor,
        heads: slice,
        values: Tensor,
        grad: Tensor | None = None,
    ) -> Bias:
        """Returns the bias of some heads of the ``rows`` of a rank at ``positions``."""
        if values.dim() == 4:
            positions = torch.arange(values.shape[2], dtype=torch.int32, device=keys.device)
        if values.shape[1] == 1:
            return cls(positions[rows], keys, values, grad)
        of_heads = None if grad is None else grad[:, heads]
        return cls(positions[rows], keys, values[:, heads], of_heads)

    def check(self, q: Tensor, k: Tensor) -> None:
        """Raises ValueError unless it is one of scores of ``q`` and ``k``."""
        entries = len(self.values) if len(self.values) in (1, len(q)) else 1
        shape: tuple[int, ...] = (entries, q.shape[1])
        dtype, sizes = torch.float32, self.values.shape
        if len(sizes) == 3:
            shape = (1, q.shape[1], sizes[2] // 2 * 2 + 1)  # places from -R to R: an odd number
        elif len(sizes) == 4:
            dtype = self.values.dtype
            shape = (entries, sizes[1] if sizes[1] == 1 else q.shape[1], *sizes[2:])
        expect("bias.queries", self.queries, q.shape[2:3], torch.int32, q.device)
        expect("bias.keys", self.keys, k.shape[2:3], torch.int32, q.device)
        expect("bias.values", self.values, shape, dtype, q.device)
        if self.grad is not None:
            expect("bias.grad", self.grad, shape, torch.float32, q.device)

    def scores(self) -> Tensor:
        """Returns the term of each score, fp32 (B or 1, Hq, Sq, Sk)."""
        if not self.entries:
            return self._terms(self.values)
        return torch.stack([self._terms(self._of(self.values, *entry)) for entry in self.entries])

    def _of(self, x: Tensor, entry: int, heads: slice) -> Tensor:
        """Returns the part of values or gradients of a batch entry and some heads."""
        return x[entry % len(x), heads if x.shape[1] > 1 else slice(None)]

    def _terms(self, values: Tensor) -> Tensor:
        if self.values.dim() == 4:
            return values[..., self.queries.unsqueeze(-1), self.keys].float()
        distances = self.keys - self.queries.unsqueeze(-1)
        if self.values.dim() == 2:
            return -values[..., None, None] * distances.abs()
        reach = values.shape[-1] // 2
        return values[..., distances.clamp_(-reach, reach).add_(reach)]

    def add(self, gradients: Tensor) -> None:
        """Adds the ``gradients`` of scores, fp32 (B, Hq, Sq, Sk), 0 where a key is hidden, to
        those of tables: sums over runs of keys, as distances grow along a row; or of pairs."""
        if self.grad is None:
            return
        every = self.entries or [(entry, slice(None)) for entry in range(len(gradients))]
        if self.grad.dim() == 4:
            places = (self.queries.long().unsqueeze(-1) * self.grad.shape[3] + self.keys).flatten()
            for entry, part in zip(every, gradients, strict=True):
                into = self._of(self.grad, *entry)
                added = part.sum_to_size(len(into), *part.shape[1:]).flatten(1)
                into.view(len(into), -1).scatter_add_(1, places.expand_as(added), added)
            return
        # Keys are sorted, so those of one place in the table are a run in each row, and its sum a
        # difference of the running sum at both ends; the first and the last place take the rest.
        reach = self.values.shape[2] // 2
        steps = torch.arange(1 - reach, reach + 1, dtype=torch.int32, device=self.keys.device)
        first = torch.searchsorted(self.keys, self.queries[:, None] + steps)
        edges = pad(pad(first, (1, 0)), (0, 1), value=len(self.keys))
        sums = pad(gradients.cumsum(-1), (1, 0))
        by_place = sums.gather(-1, edges.expand(*sums.shape[:2], -1, -1)).diff(dim=-1).sum(-2)
        for entry, part in zip(every, by_place, strict=True):
            self._of(self.grad, *entry).add_(part)

    def by_group(self, batch: slice, kv_heads: int) -> Bias:
        """Returns the bias of some batch entries with one entry per K/V head."""
        group = self.values.shape[1] // kv_heads
        heads = [slice(head * group, (head + 1) * group) for head in range(kv_heads)]
        every = range(batch.start, batch.stop)
        return self._replace(entries=tuple((entry, part) for entry in every for part in heads))

    def part(self, heads: slice, rows: slice, keys: slice) -> Bias:
        """Returns the bias of some entries of ``by_group``, query rows and keys."""
        return self._replace(
            queries=self.queries[rows], keys=self.keys[keys], entries=self.entries[heads]
        )

    def arguments(self, *, keys_walk: bool) -> tuple[Any, ...]:
        """Returns the argument ``bias`` of Triton's kernels, see ``tiles.bias_of``."""
        # Of each kernel one side stays in its block of rows, and tiles of the other walk past.
        stay, walk = (self.queries, self.keys) if keys_walk else (self.keys, self.queries)
        sizes, strides = self.values.shape, self.values.stride()
        # A stride of 0 shares one entry, or one head, among all.
        of_entry, of_head = (strides[i] if sizes[i] > 1 else 0 for i in range(2))
        rest: tuple[int, ...] = tuple(size // 2 for size in sizes[2:])  # R of tables
        if len(rest) == 2:  # strides of rows that stay and of those that walk
            rest = (sizes[3], 1) if keys_walk else (1, sizes[3])
        return self.values, of_entry, of_head, stay, walk, *rest

    def sums(self, batch: int, blocks: int) -> Tensor | None:
        """Returns what Triton's kernels add gradients to, for tables (batch, Hq, blocks, ...) by
        program; those of pairs themselves, see ``shared``."""
        if self.grad is None or self.grad.dim() == 4:
            return self.grad
        return self.grad.new_zeros((batch, self.grad.shape[1], blocks, self.grad.shape[2]))

    def collect(self, sums: Tensor) -> None:
        """Adds ``sums`` to the gradient."""
        if self.grad is not None and self.grad is not sums:
            self.grad.add_(sums.sum((0, 2)))

    def shared(self, q: Tensor) -> tuple[bool, bool]:
        """Returns whether batch entries, and heads, of ``q`` add to the same gradients of pairs."""
        if self.grad is None or self.grad.dim() < 4:
            return False, False
        return len(self.grad) < len(q), self.grad.shape[1] < q.shape[1]
