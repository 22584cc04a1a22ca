"""The exchange of one transport on one ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ringray.traffic.routes import Route

# Ways in which the tuner tries a transport: by its name alone, with each divisor of the ring size
# between 1 and that size as its number, or not at all.
Searched = Literal["name", "divisors", "never"]


@dataclass(frozen=True)
class Exchange:
    """The way in which K/V reaches the ranks of one ring.

    ``routes``: the ways in which chunks can walk on a ring of ``world size / fold`` ranks; the
    cheapest one is taken. ``fold``: neighbouring ranks that first exchange heads for rows, so that
    each holds the rows of all of them for its share of the heads (1: none). ``heads_at_once``: K/V
    heads that are gathered from all ranks and computed with at once; None: chunks of all heads walk
    the route. ``staged``: messages go through host memory. ``inner``: neighbouring ranks that
    exchange most, and belong on one node (1: none).
    """

    routes: tuple[Route, ...]
    fold: int = 1
    heads_at_once: int | None = None
    staged: bool = False
    inner: int = 1

    @property
    def walks(self) -> bool:
        """Returns whether there are several ways back: not where heads are gathered, nor where all
        ranks exchange them."""
        return self.heads_at_once is None and (self.fold == 1 or self.routes[0].ranks > 1)
