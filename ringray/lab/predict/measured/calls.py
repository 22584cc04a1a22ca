"""Seconds of attention calls by rows, heads and K/V heads, between those that were measured.

A call takes its launch, and then the longer of two, roughly: its longest chain of tiles, however
few heads there are, or all its tiles, shared by all units of the device. Measured times are
multiples of that shape near 1, which change little from one to the next. Imports numpy only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ringray.lab.predict import measured
from ringray.lab.predict.measured import Floats

WINDOW = 128  # keys of a query in the measured calls with a window
_ALONE = 8192  # rows: one head of so many has at most 64 chains of tiles, fewer than units
_COLUMN = 3  # numbers of heads, at least, with which as many K/V heads count


@dataclass(frozen=True, eq=False)
class Calls:
    """Forward calls of one mask and head dim. ``seconds``: by heads and K/V heads, at ``rows``.
    ``window``: keys of a query, 0: as many as rows."""

    rows: Floats
    seconds: dict[tuple[int, int], Floats]
    window: int = 0

    def time(self, rows: Floats, heads: int, kv_heads: int, work: float = 1.0) -> Floats:
        """Returns seconds of calls. ``work``: pairs of a call that sees more of the same chains,
        over its pairs. Calls of more rows than measured ones have chains that are longer, and take
        as long per row as the longest measured ones with as many chains."""
        last = self.rows[-1]
        seconds = self._within(np.minimum(rows, last), heads, kv_heads, work)
        for i in np.flatnonzero(rows > last):
            longer = float(rows[i] / last)
            (time,) = self._within(np.full(1, last), heads * longer, kv_heads, work)
            seconds[i] = time * (1.0 if self.window else longer)
        return seconds

    def _within(self, rows: Floats, heads: float, kv_heads: float, work: float) -> Floats:
        """Returns seconds of calls of no more rows than measured ones."""
        by_kv = {
            kv or heads: measured.between(heads, column.items())
            for kv, column in self._columns.items()
            if kv <= heads
        }
        factors = measured.between(kv_heads, by_kv.items())
        factor: Floats = np.exp(np.interp(np.log(rows), np.log(self.rows), factors))
        return factor * self._shape(rows, heads, work)

    @cached_property
    def _columns(self) -> dict[int, dict[int, Floats]]:
        """Logarithms of measured times over the shape by K/V heads, 0: as many as heads; then by
        heads, at the measured rows."""
        columns: dict[int, dict[int, Floats]] = {}
        for (heads, kv), seconds in self.seconds.items():
            for column in {kv, 0} if kv == heads else {kv}:
                factors = np.log(seconds / self._shape(self.rows, heads))
                columns.setdefault(column, {})[heads] = factors
        return {kv: column for kv, column in columns.items() if len(column) >= _COLUMN}

    def _shape(self, rows: Floats, heads: float, work: float = 1.0) -> Floats:
        launch, chain, pair = self._terms
        keys = np.minimum(rows, self.window or math.inf)
        seconds: Floats = launch + np.hypot(chain * keys, work * pair * heads * rows * keys)
        return seconds

    @cached_property
    def _terms(self) -> tuple[float, float, float]:
        """Seconds of the launch, of a key of the longest chain and of a pair of rows and keys, from
        the shortest call, a long one of the fewest heads and the largest."""
        even = {heads: seconds for (heads, kv), seconds in self.seconds.items() if kv == heads}
        launch = float(min(seconds.min() for seconds in even.values()))
        few, many, rows = min(even), max(even), self.rows
        keys = np.minimum(rows, self.window or math.inf)
        pair = (even[many][-1] - launch) / (many * rows[-1] * keys[-1])
        alone = int(np.searchsorted(rows, _ALONE, "right")) - 1
        rest = (even[few][alone] - launch) ** 2 - (few * pair * rows[alone] * keys[alone]) ** 2
        return launch, math.sqrt(max(rest, 0.0)) / keys[alone], pair


@lru_cache(maxsize=256)
def nearest(system: str, kind: str, head_dim: int, window: int = 0) -> tuple[int, Calls] | None:
    """Returns the measured calls of a system, of one kind (``causal``, ``full``, ``mla``) and the
    nearest head dim, after it; None where there are none."""
    table = measured.read(system).get(kind)
    dims = {n[0] for n in table.seconds if n[1] == window} if table else set()
    if not table or not dims:
        return None
    dim = min(sorted(dims), key=lambda size: abs(math.log(size / head_dim)))
    chosen = {(n[2], n[3]): s for n, s in table.seconds.items() if n[:2] == (dim, window)}
    return dim, Calls(table.at, chosen, window)
