"""Contract of the dealer, for any mask and weights: every position once, equal rows, padding last,
and closed forms that are those of the definitions; work by weight."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import ringray
from ringray import partition as partitions
from ringray.traffic import geometry
from ringray.traffic.deal import Deal, deal
from ringray.traffic.dealer import TILE
from ringray.traffic.geometry import Layout
from tests.support.brute_force import any_mask, seen

LARGE = 16 * TILE  # rows of a rank, of which tiles are a small part


@st.composite
def deals(draw: st.DrawFn) -> Deal:
    """A deal of any mask, with weights or without."""
    ranks, weight = draw(st.integers(1, 6)), st.floats(0.1, 4)
    several = st.lists(weight, min_size=ranks, max_size=ranks).map(tuple)
    mask = draw(any_mask(draw(st.integers(1, 60))))
    return deal(mask, ranks, weights=draw(st.none() | several))


def positions(of: Deal) -> list[list[int]]:
    return [sorted(itertools.chain(*of.ranges(rank))) for rank in range(of.world_size)]


def check(of: Deal) -> None:
    held = positions(of)
    assert sorted(itertools.chain(*held)) == list(range(of.padded))
    assert {len(rows) for rows in held} == {of.padded // of.world_size}
    assert of.padded - of.seq_len < of.world_size
    for rank in range(of.world_size):
        ranges = of.ranges(rank)
        assert all(piece.step == 1 and piece for piece in ranges)
        assert all(a.stop < b.start for a, b in itertools.pairwise(ranges))
    table = seen(of.mask, of.padded)
    layout = Layout(of, of.padded, of.world_size)
    for travelling in ("keys", "queries"):
        pairs = geometry.pairs(layout, of.mask, travelling)
        for visitor, owner in itertools.product(range(of.world_size), repeat=2):
            if travelling == "keys":
                block = table[np.ix_(held[visitor], held[owner])]
            else:
                block = table[np.ix_(held[owner], held[visitor])].T
            check_pair(pairs, (visitor, owner), block)
    assert list(of.work) == [table[rows].sum() for rows in held]
    others = [
        sum(table[rows][:, other].any(0).sum() for other in held if other is not rows)
        for rows in held
    ]
    assert list(of.rows_received) == others


def check_pair(pairs: geometry.Pairs, at: tuple[int, int], block: NDArray[np.bool_]) -> None:
    """Compares one pair of ranks with ``block``: which of the owner's rows each of the visitor's
    rows meets."""
    assert pairs.visible[at] == block.sum()
    needed = block.any(0)
    (rows,) = np.nonzero(needed)
    hull = (rows[0], rows[-1] + 1) if len(rows) else (0, 0)
    assert (pairs.first[0][at], pairs.stop[0][at]) == hull
    assert pairs.runs is not None
    runs = pairs.runs.of(*at)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(runs)), "runs that touch are one"
    assert [row for run in runs for row in range(*run)] == rows.tolist()
    assert pairs.runs.rows[at] == len(rows)


@settings(deadline=None, max_examples=100)
@given(deals())
def test_any_deal(of: Deal) -> None:
    check(of)


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=3000)
@given(deals())
def test_many_deals(of: Deal) -> None:
    check(of)


# Long sequences, of which tiles are a small part


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_long_causal_document_is_dealt_as_zigzag(ranks: int) -> None:
    seq_len = 2 * TILE * 16 * ranks
    zigzag = partitions.get("zigzag").ranges
    of = ringray.deal(seq_len, ranks)
    want = {zigzag(seq_len, ranks, rank) for rank in range(ranks)}
    # Neighbouring blocks are one.
    joined = {(range(a.start, b.stop),) if a.stop == b.start else (a, b) for a, b in want}
    assert {of.ranges(rank) for rank in range(ranks)} == joined
    assert of.balance == 1


def test_a_full_mask_is_dealt_in_one_piece_for_each_rank() -> None:
    of = ringray.deal(4 * LARGE, 4, causal=False)
    assert [len(of.ranges(rank)) for rank in range(4)] == [1] * 4
    assert of.balance == 1


@pytest.mark.parametrize("weights", [(1, 1, 1, 1.5), (3, 2, 2, 2), (1.2, 1, 1, 0.8)])
def test_work_is_in_proportion_to_weights(weights: tuple[float, ...]) -> None:
    """Rows are equal whatever the weights; cuts are in tiles, as the rows of a rank are."""
    of = ringray.deal(4 * LARGE, 4, weights=weights)
    times = np.array(of.work) / np.array(weights)
    assert times.max() / times.min() < 1.1, times
    cuts = {piece.start for rank in range(4) for piece in of.ranges(rank)}
    assert all(cut % TILE == 0 for cut in cuts)
    assert {len(rows) for rows in positions(of)} == {LARGE}


def test_short_documents_stay_whole() -> None:
    """A rank's rows are 16 documents: none is cut, and nothing is sent."""
    of = ringray.deal(4 * LARGE, 4, cu_seqlens=range(0, 4 * LARGE + 1, TILE))
    assert of.rows_received == (0,) * 4
    assert of.balance == 1
    held = [of.documents(rank) for rank in range(4)]
    assert sorted(itertools.chain(*held)) == list(range(64))
