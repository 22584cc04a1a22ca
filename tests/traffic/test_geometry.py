"""Closed forms of visible pairs and needed rows, against the definitions row by row."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ringray.lab.predict import cost_model, hardware
from ringray.partition import PARTITIONS, Partitioning, padded_length
from ringray.traffic import geometry
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask, uneven_boundaries
from tests.support.brute_force import any_mask, blocks, masks, problems, rows, seen
from tests.support.exhaustive import exhaustive
from tests.support.point import point


def check_hulls(
    found: geometry.Pairs, cuts: NDArray[np.int64], at: tuple[int, int], needed: NDArray[np.bool_]
) -> None:
    """Compares the hulls of all parts with the rows that are needed. ``cuts``: rows that bound
    the parts."""
    for part, (low, high) in enumerate(itertools.pairwise(cuts)):
        rows = low + np.flatnonzero(needed[low:high])
        hull = (rows[0], rows[-1] + 1) if len(rows) else (0, 0)
        assert (found.first[part][at], found.stop[part][at]) == hull, (at, part)


def whole(found: geometry.Pairs, at: tuple[int, int]) -> tuple[int, int] | None:
    """Returns the hull of all parts."""
    hulls = [(first[at], stop[at]) for first, stop in zip(found.first, found.stop, strict=True)]
    some = [hull for hull in hulls if hull[1]]
    return (some[0][0], some[-1][1]) if some else None


def check(name: Partitioning, padded: int, ranks: int, mask: Mask) -> None:
    layout = Layout(name, padded, ranks)
    counted, cuts = geometry.pairs(layout, mask), geometry.cuts(layout, mask, "keys")
    dealt = rows(name, padded, ranks)
    total = 0
    for query, key, block in blocks(name, padded, ranks, mask):
        case = (name, padded, ranks, mask, query, key)
        assert counted.visible[query, key] == block.sum(), case
        bounds = np.searchsorted(dealt[key], cuts[:, key])
        check_hulls(counted, bounds, (query, key), block.any(0))
        total += block.sum()
    # All pairs of ranks together hold each visible pair once.
    assert (
        counted.visible.sum() == total == seen(mask, padded).sum() == geometry.total_visible(mask)
    )


@pytest.mark.parametrize(
    "case",
    [
        *zip(PARTITIONS, (3, 2, 4, 3), strict=True),
        *exhaustive(*itertools.product(PARTITIONS, (1, 2, 3, 4))),
    ],
    ids=str,
)
def test_small_sizes_exhaustively(case: tuple[str, int]) -> None:
    name, ranks = case
    for seq_len in (1, 2, 3, 5, 8, 13, 16, 23):
        for mask in masks(seq_len):
            check(name, padded_length(name, seq_len, ranks), ranks, mask)


@settings(deadline=None, max_examples=150)
@given(problems())
def test_any_problem(problem: tuple[Partitioning, int, int, Mask]) -> None:
    check(*problem)


@settings(deadline=None, max_examples=100)
@given(problems())
def test_queries_that_travel_are_those_that_see_a_key(
    problem: tuple[Partitioning, int, int, Mask],
) -> None:
    name, padded, ranks, mask = problem
    counted = geometry.pairs(Layout(name, padded, ranks), mask, "queries")
    for query, key, block in blocks(name, padded, ranks, mask):
        assert counted.visible[key, query] == block.sum()
        check_hulls(counted, np.array([0, padded // ranks]), (key, query), block.any(1))


@pytest.mark.parametrize("causal", [True, False])
def test_flops_are_exact(causal: bool) -> None:
    """4 D per visible pair and head forward, 2.5 times that backward."""
    config = point(
        ring_size=3, seq_len=61, batch=2, heads=4, kv_heads=2, head_dim=16, causal=causal,
        window=9 if causal else None, documents=(20, 41),
    )  # fmt: skip
    pairs = int(seen(config.problem.mask, 66).sum())
    for name in PARTITIONS:
        both = config.changed(partition=name)
        cost = cost_model.predict(both, hardware.cpu(2))
        assert cost.flops == pairs * 4 * 16 * 4 * 2 * 7 // 2
        forward = cost_model.predict(both.changed(direction="forward"), hardware.cpu(2))
        assert forward.flops == pairs * 4 * 16 * 4 * 2


def test_balance_of_causal_work() -> None:
    """Zigzag deals causal work evenly, contiguous gives the last rank most of it."""
    mask = Mask(64)
    work = {name: geometry.pairs(Layout(name, 64, 4), mask).visible.sum(1) for name in PARTITIONS}
    assert work["contiguous"].tolist() == [136, 392, 648, 904]
    assert len(set(work["zigzag"].tolist())) == 1
    assert len(set(work["zigzag-token"].tolist())) == 1


@pytest.mark.parametrize(
    "mask",
    [
        {"seq_len": 0},
        {"seq_len": 8, "window": -1},
        {"seq_len": 8, "window": 2, "causal": False},
        {"seq_len": 8, "window": (2, 1)},
        {"seq_len": 8, "chunk": 0},
        {"seq_len": 8, "prefix": (-1,)},
        {"seq_len": 8, "prefix": (1, 2)},
        {"seq_len": 8, "prefix": (3,), "causal": False},
        {"seq_len": 8, "global_tokens": 0, "window": 2},
        {"seq_len": 8, "global_tokens": 2},
        {"seq_len": 8, "global_tokens": 2, "window": 2, "prefix": (3,)},
        {"seq_len": 8, "global_tokens": 2, "documents": ((0, 8), (0, 3, 8))},
        {"seq_len": 8, "shared_prefix": 0, "documents": (0, 4, 8)},
        {"seq_len": 8, "shared_prefix": 2},
        {"seq_len": 8, "shared_prefix": 2, "documents": (0, 4, 8), "prefix": (3,)},
        {"seq_len": 8, "documents": (0, 4)},
        {"seq_len": 8, "documents": (1, 8)},
        {"seq_len": 8, "documents": (0, 5, 3, 8)},
    ],
)
def test_masks_that_mean_nothing(mask: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"got|window=|prefix="):
        Mask(**mask)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50)
@given(problems(), st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=1, max_size=3))
def test_documents_of_each_batch_row(
    problem: tuple[Partitioning, int, int, Mask], cuts: list[list[int]]
) -> None:
    """Visible pairs of all rows together, and the hull of what any of them needs."""
    name, padded, ranks, mask = problem
    mask = replace(mask, prefix=mask.prefix and mask.prefix[:1])
    last = mask.seq_len
    rows = tuple((0, *sorted(min(cut, last) for cut in row), last) for row in cuts)
    each = [replace(mask, documents=row) for row in rows]
    mask = replace(mask, documents=rows)
    assert mask.rows == (tuple(each) if len(set(rows)) > 1 else (each[0],))
    for travelling in ("keys", "queries"):
        counted = geometry.pairs(Layout(name, padded, ranks), mask, travelling)
        alone = [geometry.pairs(Layout(name, padded, ranks), row, travelling) for row in mask.rows]
        assert np.array_equal(counted.visible, sum(one.visible for one in alone))
        for at in np.ndindex(ranks, ranks):
            hulls = [hull for one in alone if (hull := whole(one, at))]
            expected = (min(hulls)[0], max(stop for _, stop in hulls)) if hulls else None
            assert whole(counted, at) == expected


def test_one_mask_has_one_form() -> None:
    """So that ranks that write it differently agree."""
    assert Mask(8, True, (3, 0)) == Mask(8, True, (3, None)) == Mask(8, True, 3)
    assert Mask(8, True, (None, 0)) == Mask(8, prefix=(0,)) == Mask(8)
    assert Mask(8, False, (None, None)) == Mask(8, False)
    assert Mask(8, False, (3, 0)) != Mask(8, False, (3, None))


@pytest.mark.parametrize(("seq_len", "count"), [(1, 1), (7, 3), (64, 5), (3, 10), (1000, 64)])
def test_documents_of_fixed_uneven_lengths(seq_len: int, count: int) -> None:
    bounds = uneven_boundaries(seq_len, count)
    assert len(bounds) == count + 1
    assert (bounds[0], bounds[-1]) == (0, seq_len)
    assert list(bounds) == sorted(bounds)
    Mask(seq_len, documents=bounds)


@st.composite
def large(draw: st.DrawFn) -> tuple[Layout, Mask]:
    """A problem with about as many rows per rank, or positions, as numbers of 32 bits allow."""
    name, ranks = draw(st.sampled_from(sorted(PARTITIONS))), draw(st.integers(1, 6))
    rows = st.integers(20_000, 140_000).map(lambda rows: rows * ranks)
    seq_len = draw(rows | st.integers(1 << 28, (1 << 31) - 1))
    mask = draw(any_mask(seq_len).filter(lambda one: not one.chunk or one.chunk > seq_len // 99))
    return Layout(name, padded_length(name, seq_len, ranks), ranks), mask


@settings(deadline=None, max_examples=100)
@given(large(), st.sampled_from(["keys", "queries"]))
def test_numbers_of_32_bits_suffice_where_they_are_taken(
    problem: tuple[Layout, Mask], travelling: geometry.Travelling
) -> None:
    uncached = geometry.pairs.__wrapped__
    counted = uncached(*problem, travelling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "_NARROW", 0)
        for narrow, wide in zip(counted[:3], uncached(*problem, travelling)[:3], strict=True):
            assert np.array_equal(narrow, wide)
    assert counted.visible.sum() == geometry.total_visible(problem[1])
