"""Striped: token k goes to rank k mod N (Brandon et al., Striped Attention, 2023)."""

GRANULARITY = 1


def ranges(seq_len: int, world_size: int, rank: int) -> tuple[range, ...]:
    """Returns the positions of ``rank``: ``rank, rank + N, rank + 2N, ...``."""
    return (range(rank, seq_len, world_size),)
