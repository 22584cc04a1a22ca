"""Intervals: what each query row sees, and the inverse, against the definitions."""

from __future__ import annotations

import copy
import pickle
import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringray.attention.problem import keywords
from ringray.traffic.mask import Mask
from ringray_kernels import testing
from ringray_kernels.intervals import derived, intervals, inverse, visible_ranges
from tests.support.brute_force import any_mask, seen


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mask, int, int]:
    """(mask, rows of padding, stride of the keys)."""
    return (
        draw(st.integers(1, 40).flatmap(any_mask)),
        draw(st.integers(0, 5)),
        draw(st.integers(1, 4)),
    )


@settings(deadline=None, max_examples=200)
@given(cases(), st.integers(0, 2**31))
def test_a_row_sees_exactly_its_interval(case: tuple[Mask, int, int], seed: int) -> None:
    mask, padding, stride = case
    generator = torch.Generator().manual_seed(seed)
    everyone = torch.arange(mask.seq_len + padding)
    queries = everyone[torch.rand(len(everyone), generator=generator) < 0.7]
    keys = everyone[::stride].contiguous()
    expected = torch.from_numpy(seen(mask, len(everyone)))[queries][:, keys]
    rows, found = torch.arange(len(keys)), torch.zeros(expected.shape, dtype=torch.int64)
    ranges = visible_ranges(queries, mask.seq_len, **keywords(mask, "cpu"))
    of_all = mask.global_tokens is not None and not mask.causal
    assert len(ranges) == (1 if mask.far_keys is None else 2 + of_all)
    for low, high in ranges:
        start, end = intervals(low, high, keys)
        assert start.dtype == end.dtype == torch.int32
        assert (start.diff() >= 0).all()
        assert (end.diff() >= 0).all()
        found += (rows >= start[:, None]) & (rows < end[:, None])  # a pair is in one range only
        assert (start[queries >= mask.seq_len] == end[queries >= mask.seq_len]).all()
    assert found.equal(expected.long())


monotone = st.lists(st.integers(0, 12), min_size=1, max_size=20).map(sorted)


@settings(deadline=None, max_examples=200)
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
    one = testing.visible(10, causal=True, window=3)
    assert one.sum(1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    both = testing.visible(6, causal=False, window=(2, 1))
    assert both.sum(1).tolist() == [2, 3, 4, 4, 4, 3]


def test_chunks_begin_with_each_document_and_prefixes_see_all_of_themselves() -> None:
    """Of transformers: positions restart in packed documents, and its chunks with them."""
    cu = torch.tensor([0, 5, 9])
    chunks = testing.visible(9, causal=True, chunk=2, cu_seqlens=cu)
    assert chunks.sum(1).tolist() == [1, 2, 1, 2, 1, 1, 2, 1, 2]
    both = testing.visible(9, causal=True, prefix=[3, 1], window=0, cu_seqlens=cu)
    assert both.sum(1).tolist() == [3, 3, 3, 1, 1, 1, 1, 1, 1]


def test_what_is_derived_is_kept_until_a_bound_changes() -> None:
    start, end = torch.zeros(3, dtype=torch.int32), torch.full((3,), 5, dtype=torch.int32)
    made = list[int]()

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert [derived(start, end, "a", make) for _ in range(3)] == [0, 0, 0]
    assert derived(start, end, "b", make) == 1
    end[0] = 4
    assert [derived(start, end, "a", make) for _ in range(2)] == [2, 2]
    start += 1
    assert derived(start, end, "a", make) == 3
    assert derived(start, end.clone(), "a", make) == 4  # another end
    assert derived(pickle.loads(pickle.dumps(start)), end, "a", make) == 5
    assert derived(copy.deepcopy(start), end, "a", make) == 6
    with torch.inference_mode():
        uncounted = torch.zeros(3, dtype=torch.int32)
        assert [derived(uncounted, end, "a", make) for _ in range(2)] == [7, 8]
    gone = weakref.ref(start)
    del start
    assert gone() is None  # at once: what is kept makes no cycle
