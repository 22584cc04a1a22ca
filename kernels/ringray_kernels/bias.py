"""Biases of scores: functions of the global positions of a query and a key.

Distances are integers, so neither sharding nor rounding changes a bias.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Bias(NamedTuple):
    """The bias of one hop. ``queries`` (Sq,), ``keys`` (Sk,): global positions, int32. ``slopes``
    (B or 1, Hq), fp32: head h adds -slope_h * |i - j| to the score of positions i and j (ALiBi,
    Press et al., 2022)."""

    queries: Tensor
    keys: Tensor
    slopes: Tensor

    def scores(self) -> Tensor:
        """Returns the term of each score, fp32 (B or 1, Hq, Sq, Sk)."""
        distances = (self.keys - self.queries.unsqueeze(-1)).abs()
        return -self.slopes[..., None, None] * distances

    def by_group(self, batch: slice, kv_heads: int) -> Bias:
        """Returns the bias of some batch entries with one entry per K/V head: slopes (entries *
        Hkv, Hq / Hkv)."""
        entries = self.slopes.expand(max(batch.stop, len(self.slopes)), -1)[batch]
        return self._replace(slopes=entries.reshape(-1, entries.shape[1] // kv_heads))

    def part(self, heads: slice, rows: slice, keys: slice) -> Bias:
        """Returns the bias of some entries of ``by_group``, query rows and keys."""
        return Bias(self.queries[rows], self.keys[keys], self.slopes[heads])
