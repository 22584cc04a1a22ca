"""A tree of merges: every rank ends with the merge of the parts of all ranks.

Recursive doubling: at each step a rank swaps its part with that of the rank whose number differs in
one bit. Ranks beyond the largest power of two give theirs to a rank below it first, and take the
result from it in the end. Any two ranks that merge the same parts do so in one order, so the
results of all ranks are the same bit by bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

Deed = Literal["swap", "give", "merge", "take"]


class TreeStep(NamedTuple):
    """One step of a rank with a peer.

    ``deed``: both send and merge (``swap``), this rank sends (``give``), or receives a part to
    ``merge``, or to ``take`` in place of its own.
    """

    peer: int
    deed: Deed

    @property
    def sends(self) -> bool:
        """Tells whether this rank sends its part."""
        return self.deed in ("swap", "give")


@lru_cache(maxsize=1024)
def meetings(ranks: int, rank: int) -> tuple[TreeStep, ...]:
    """Returns the steps of one rank, in order."""
    doubled = 1 << (ranks.bit_length() - 1)  # ranks that swap
    if rank >= doubled:
        return TreeStep(rank - doubled, "give"), TreeStep(rank - doubled, "take")
    swaps = [TreeStep(rank ^ (1 << bit), "swap") for bit in range(doubled.bit_length() - 1)]
    if rank + doubled >= ranks:
        return tuple(swaps)
    return TreeStep(rank + doubled, "merge"), *swaps, TreeStep(rank + doubled, "give")


def messages(ranks: int) -> int:
    """Counts the messages of all ranks."""
    return sum(meeting.sends for rank in range(ranks) for meeting in meetings(ranks, rank))
