"""Contiguous: rank r holds the r-th of N equal blocks. Causal work grows with the rank."""

GRANULARITY = 1


def ranges(seq_len: int, world_size: int, rank: int) -> tuple[range, ...]:
    """Returns the positions of ``rank``: ``[rank * S/N, (rank + 1) * S/N)``."""
    size = seq_len // world_size
    return (range(rank * size, (rank + 1) * size),)
