"""The positions that each partition deals to each rank: the definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ringray
from ringray.partition import PARTITIONS, padded_length


def contiguous(token: int, ranks: int, padded: int) -> int:
    """Equal blocks in order."""
    return token // (padded // ranks)


def striped(token: int, ranks: int, padded: int) -> int:
    """Token k goes to rank k mod N."""
    return token % ranks


def zigzag(token: int, ranks: int, padded: int) -> int:
    """Blocks r and 2N - 1 - r of 2N equal blocks go to rank r."""
    block = token // (padded // (2 * ranks))
    return min(block, 2 * ranks - 1 - block)


def zigzag_token(token: int, ranks: int, padded: int) -> int:
    """Folds of N tokens run up the ranks and down again by turns."""
    fold, place = divmod(token, ranks)
    return place if fold % 2 == 0 else ranks - 1 - place


OWNERS: dict[str, Callable[[int, int, int], int]] = {
    "contiguous": contiguous,
    "striped": striped,
    "zigzag": zigzag,
    "zigzag-token": zigzag_token,
}


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_each_token_is_at_the_rank_of_the_definition(name: str, ranks: int) -> None:
    """Padding follows the last token."""
    for seq_len in (1, 2 * ranks, 6 * ranks - 1, 14 * ranks):
        padded = padded_length(name, seq_len, ranks)
        for rank in range(ranks):
            held = ringray.local_positions(name, seq_len, ranks, rank).tolist()
            expected = [k for k in range(padded) if OWNERS[name](k, ranks, padded) == rank]
            assert held == expected, (ranks, seq_len, rank)
