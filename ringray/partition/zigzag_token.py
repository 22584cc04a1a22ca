"""Zigzag by token: the sequence is folded token by token, so rank r holds r and 2N-1-r of each 2N.

Balance is as fine as it can be: any two ranks differ by at most one key per query row.
"""

GRANULARITY = 2


def ranges(seq_len: int, world_size: int, rank: int) -> tuple[range, ...]:
    """Returns the positions of ``rank``: ``r, 2N-1-r, 2N+r, 4N-1-r, ...`` in two progressions."""
    step = 2 * world_size
    return (range(rank, seq_len, step), range(step - 1 - rank, seq_len, step))
