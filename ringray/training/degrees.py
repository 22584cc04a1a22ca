"""Degrees of parallelism. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Degrees:
    """Ranks of each kind of parallelism: data, context (the ring), tensor, pipeline."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """Returns the ranks of all together."""
        return self.dp * self.cp * self.tp * self.pp

    def __str__(self) -> str:
        return f"DP {self.dp} x CP {self.cp} x TP {self.tp} x PP {self.pp}"
