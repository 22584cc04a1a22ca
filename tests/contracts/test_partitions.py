"""Contract of every registered partition, whatever its rule."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringray import partition as partitions
from ringray.partition import PARTITIONS

every = pytest.mark.parametrize("name", PARTITIONS)


def shards(name: str, padded: int, ranks: int) -> list[tuple[range, ...]]:
    return [PARTITIONS[name].ranges(padded, ranks, rank) for rank in range(ranks)]


def check(name: str, padded: int, ranks: int) -> None:
    dealt = shards(name, padded, ranks)
    positions = [sorted(itertools.chain(*pieces)) for pieces in dealt]
    # disjoint and covering: together every position once
    assert sorted(itertools.chain(*positions)) == list(range(padded))
    # equal shards; strictly increasing follows, as no position comes twice
    assert {len(rows) for rows in positions} == {padded // ranks}
    # one step for all pieces of all ranks, and the same number of pieces
    steps = {piece.step for pieces in dealt for piece in pieces}
    assert len(steps) == 1
    assert steps.pop() >= 1
    assert len({len(pieces) for pieces in dealt}) == 1
    # and both are those of any other length: plans predict lengths together
    shortest = shards(name, PARTITIONS[name].granularity * ranks, ranks)
    assert [[one.step for one in pieces] for pieces in dealt] == [
        [one.step for one in pieces] for pieces in shortest
    ]


@every
@settings(deadline=None, max_examples=60)
@given(ranks=st.integers(1, 64), multiple=st.integers(1, 60))
def test_any_sequence_is_dealt_evenly(name: str, ranks: int, multiple: int) -> None:
    check(name, PARTITIONS[name].granularity * ranks * multiple, ranks)


@every
@given(seq_len=st.integers(1, 2**31), ranks=st.integers(1, 1024))
def test_padding_is_the_least_that_deals_evenly(name: str, seq_len: int, ranks: int) -> None:
    padded = partitions.padded_length(name, seq_len, ranks)
    unit = PARTITIONS[name].granularity * ranks
    assert padded % unit == 0
    assert 0 <= padded - seq_len < unit


@every
def test_ranges_are_lazy(name: str) -> None:
    """A plan of millions of tokens must not pay for rows."""
    pieces = PARTITIONS[name].ranges(2**40, 64, 63)
    assert all(isinstance(piece, range) for piece in pieces)
    assert sum(map(len, pieces)) == 2**34


def test_unknown_names_are_told_the_nearest() -> None:
    for wrong, hint in (
        ("zigzags", "did you mean 'zigzag'?"),
        ("nothing-like-it", "expected one of"),
    ):
        with pytest.raises(ValueError, match="partition: got") as caught:
            partitions.get(wrong)
        assert hint in str(caught.value)
        assert all(name in str(caught.value) for name in PARTITIONS)
    with pytest.raises(ValueError, match="partition: got 3"):
        partitions.get(3)  # type: ignore[arg-type]
