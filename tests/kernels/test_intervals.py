"""Intervals: what each query row sees, and the inverse, against the definitions."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringray_kernels import testing
from ringray_kernels.intervals import intervals, inverse, visible_range


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, bool, int | None, torch.Tensor | None, int, int]:
    """(length, causal, window, boundaries, rows of padding, stride of the keys)."""
    seq_len = draw(st.integers(1, 40))
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(0, 45)) if causal else None
    cuts = draw(st.none() | st.lists(st.integers(0, seq_len), max_size=6))
    documents = None if cuts is None else torch.tensor([0, *sorted(cuts), seq_len])
    return seq_len, causal, window, documents, draw(st.integers(0, 5)), draw(st.integers(1, 4))


@settings(deadline=None, max_examples=400)
@given(cases(), st.integers(0, 2**31))
def test_a_row_sees_exactly_its_interval(
    case: tuple[int, bool, int | None, torch.Tensor | None, int, int], seed: int
) -> None:
    seq_len, causal, window, documents, padding, stride = case
    generator = torch.Generator().manual_seed(seed)
    everyone = torch.arange(seq_len + padding)
    queries = everyone[torch.rand(len(everyone), generator=generator) < 0.7]
    keys = everyone[::stride].contiguous()
    low, high = visible_range(queries, seq_len, causal=causal, window=window, cu_seqlens=documents)
    start, end = intervals(low, high, keys)
    assert start.dtype == end.dtype == torch.int32
    assert (start.diff() >= 0).all()
    assert (end.diff() >= 0).all()
    expected = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    bounds = [0, seq_len] if documents is None else documents.tolist()
    for i, p in enumerate(queries.tolist()):
        for j, k in enumerate(keys.tolist()):
            expected[i, j] = (
                p < seq_len
                and k < seq_len
                and (not causal or k <= p)
                and (window is None or k >= p - window)
                and any(a <= p < b and a <= k < b for a, b in itertools.pairwise(bounds))
            )
    rows = torch.arange(len(keys))
    assert ((rows >= start[:, None]) & (rows < end[:, None])).equal(expected)
    assert (start[queries >= seq_len] == end[queries >= seq_len]).all()


monotone = st.lists(st.integers(0, 12), min_size=1, max_size=20).map(sorted)


@settings(deadline=None, max_examples=400)
@given(monotone, monotone, st.integers(1, 14))
def test_the_inverse_says_who_sees_a_key(low: list[int], high: list[int], num_keys: int) -> None:
    rows = min(len(low), len(high))
    start = torch.tensor(low[:rows], dtype=torch.int32).clamp(max=num_keys)
    end = torch.tensor(high[:rows], dtype=torch.int32).clamp(max=num_keys)
    end = torch.maximum(start, end)
    first, stop = inverse(start, end, num_keys)
    assert first.dtype == stop.dtype == torch.int32
    for key in range(num_keys):
        seers = [i for i in range(rows) if start[i] <= key < end[i]]
        expected = (seers[0], seers[-1] + 1) if seers else None
        found = (int(first[key]), int(stop[key]))
        # Between first and stop every row sees the key, if any does.
        assert (found == expected) if expected else (found[0] >= found[1]), key


def test_a_window_of_w_is_w_plus_1_keys() -> None:
    seen = testing.visible(10, causal=True, window=3)
    assert seen.sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
