"""The positions that each partition deals to each rank: worked examples and the definitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import ringray
from ringray.partition import PARTITIONS

if TYPE_CHECKING:
    from collections.abc import Callable


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

# 16 tokens on 4 ranks.
EXAMPLES = {
    "contiguous": ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]),
    "striped": ([0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]),
    "zigzag": ([0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]),
    "zigzag-token": ([0, 7, 8, 15], [1, 6, 9, 14], [2, 5, 10, 13], [3, 4, 11, 12]),
}


def test_every_partition_has_a_definition_here() -> None:
    assert set(OWNERS) == set(EXAMPLES) == set(PARTITIONS)


@pytest.mark.parametrize("name", PARTITIONS)
def test_the_worked_example(name: str) -> None:
    dealt = tuple(ringray.local_positions(name, 16, 4, rank).tolist() for rank in range(4))
    assert dealt == EXAMPLES[name]


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_each_token_is_at_the_rank_of_the_definition(name: str, ranks: int) -> None:
    for padded in (2 * ranks, 6 * ranks, 14 * ranks):
        for rank in range(ranks):
            held = ringray.local_positions(name, padded, ranks, rank).tolist()
            expected = [k for k in range(padded) if OWNERS[name](k, ranks, padded) == rank]
            assert held == expected, (ranks, padded, rank)


def test_padding_follows_the_last_token() -> None:
    """13 tokens are dealt as 16; positions 13 to 15 are padding."""
    assert ringray.local_positions("zigzag-token", 13, 4, 0).tolist() == [0, 7, 8, 15]
    assert ringray.local_positions("striped", 13, 4, 1).tolist() == [1, 5, 9, 13]
