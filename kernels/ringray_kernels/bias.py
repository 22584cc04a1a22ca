"""Biases of scores: functions of the global positions of a query and a key.

Distances are integers, so neither sharding nor rounding changes a bias.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Bias(NamedTuple):
    """The bias of one hop. ``queries`` (Sq,), ``keys`` (Sk,): global positions, int32, increasing.

    ``values``, fp32: slopes (B or 1, Hq), of which head h adds -slope_h * |i - j| to the score of
    positions i and j (ALiBi, Press et al., 2022); or tables (1, Hq, 2 R + 1), of which it adds
    table_h[clamp(j - i, -R, R) + R]. ``grads``: for tables in backward one fp32 tensor (Hq, 2 R +
    1), to be added to.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    grads: tuple[Tensor, ...] = ()

    @property
    def reach(self) -> int | None:
        """Returns R of tables, None for slopes."""
        return self.values.shape[2] // 2 if self.values.dim() == 3 else None

    def scores(self) -> Tensor:
        """Returns the term of each score, fp32 (B or 1, Hq, Sq, Sk)."""
        distances = self.keys - self.queries.unsqueeze(-1)
        if self.reach is None:
            return -self.values[..., None, None] * distances.abs()
        return self.values[:, :, distances.clamp_(-self.reach, self.reach).add_(self.reach)]

    def add(self, gradients: Tensor) -> None:
        """Adds the ``gradients`` of scores, fp32 (B, Hq, Sq, Sk), 0 where a key is hidden, to
        those of tables: sums over runs of keys, as distances grow along a row."""
        if not self.grads:
            return
        reach = self.values.shape[2] // 2
        steps = torch.arange(1 - reach, reach + 1, dtype=torch.int32, device=self.keys.device)
        first = torch.searchsorted(self.keys, self.queries[:, None] + steps)
        edges = pad(pad(first, (1, 0)), (0, 1), value=len(self.keys))
        sums = pad(gradients.cumsum(-1), (1, 0))
        found = sums.gather(-1, edges.expand(*sums.shape[:2], -1, -1)).diff(dim=-1).sum(-2)
        for entry, one in enumerate(found):
            self.grads[entry % len(self.grads)].add_(one)

    def by_group(self, batch: slice, kv_heads: int) -> Bias:
        """Returns the bias of some batch entries with one entry per K/V head: slopes (entries *
        Hkv, Hq / Hkv), or tables."""
        shape = self.values.shape
        entries = self.values.expand(max(batch.stop, len(self.values)), *shape[1:])[batch]
        values = entries.reshape(-1, shape[1] // kv_heads, *shape[2:])
        return self._replace(
            values=values, grads=tuple(x for grad in self.grads for x in grad.chunk(kv_heads))
        )

    def part(self, heads: slice, rows: slice, keys: slice) -> Bias:
        """Returns the bias of some entries of ``by_group``, query rows and keys."""
        chosen = range(*heads.indices(len(self.values))) if self.grads else ()
        grads = tuple(self.grads[entry % len(self.grads)] for entry in chosen)
        return Bias(self.queries[rows], self.keys[keys], self.values[heads], grads)
