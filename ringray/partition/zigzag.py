"""Zigzag: 2N equal blocks; rank r holds blocks r and 2N-1-r, an early one and a late one.

Causal work is equal on all ranks, and at every hop each rank computes half of its rows or half of
the keys it received.
"""

GRANULARITY = 2


def ranges(seq_len: int, world_size: int, rank: int) -> tuple[range, ...]:
    """Returns the positions of ``rank``: blocks r and 2N-1-r of S / 2N tokens."""
    size = seq_len // (2 * world_size)
    mirror = 2 * world_size - 1 - rank
    return (range(rank * size, (rank + 1) * size), range(mirror * size, (mirror + 1) * size))
