"""What a transport is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringray.traffic.routes import Route


@dataclass(frozen=True)
class Exchange:
    """What a transport does on one ring.

    ``routes``: the ways in which chunks can walk, of which the cheapest is taken; on a ring of
    ``world size / fold`` ranks. ``fold``: neighbouring ranks that first exchange heads for rows, so
    that each holds the rows of all of them for its share of the heads (1: none do).
    ``heads_at_once``: K/V heads that are gathered from all ranks and computed with at once; None:
    chunks of all heads walk the route. ``staged``: messages go through host memory.
    """

    routes: tuple[Route, ...]
    fold: int = 1
    heads_at_once: int | None = None
    staged: bool = False

    @property
    def walks(self) -> bool:
        """Whether there are different ways back: not where heads are gathered, nor where all ranks
        exchange them."""
        return self.heads_at_once is None and (self.fold == 1 or self.routes[0].ranks > 1)
