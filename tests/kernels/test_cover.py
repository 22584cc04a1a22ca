"""Covers: dense calls hold each visible pair exactly once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringray_kernels.cover import MIN_RUN, DenseCall, cover
from ringray_kernels.intervals import intervals, visible_range


def check(start: torch.Tensor, end: torch.Tensor, block: int | None) -> list[DenseCall]:
    rows, keys = len(start), int(end.max()) if len(end) else 0
    times = torch.zeros(rows, max(keys, 1), dtype=torch.int64)
    met = torch.zeros(rows, dtype=torch.bool)
    calls = cover(start, end, block)
    for call in calls:
        assert 0 <= call.row < call.row_stop <= rows, call
        assert 0 <= call.key < call.key_stop <= keys, call
        i = torch.arange(call.row, call.row_stop)
        j = torch.arange(call.key, call.key_stop)
        if call.mode == "full":
            part = torch.ones(len(i), len(j), dtype=torch.bool)
        elif call.mode == "causal":
            assert len(i) == len(j), call
            part = torch.ones(len(i), len(j), dtype=torch.bool).tril()
        else:
            part = (j >= start[i, None]) & (j < end[i, None])
        assert part.any(1).all(), f"a row of {call} sees no key in it"
        assert (~met[i] if call.first else met[i]).all(), f"{call}: first is wrong"
        met[i] = True
        times[call.row : call.row_stop, call.key : call.key_stop] += part
    j = torch.arange(times.shape[1])
    assert times.equal(((j >= start[:, None]) & (j < end[:, None])).long())
    return calls


@st.composite
def bounds(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of constant, rising by one, jumping and empty rows, as masks and shards make them."""
    start, end, low, high = [], [], 0, draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["same", "rising", "window", "jump", "empty"]))
        for _ in range(draw(st.sampled_from([1, 2, 3, 63, 64, 65, 100]))):
            if kind == "rising":
                high += 1
            elif kind == "window":
                low, high = low + 1, high + 1
            elif kind == "jump":
                step = draw(st.integers(0, 3))
                low, high = low + draw(st.integers(0, step)), high + step
            high = max(low, high)
            start.append(high if kind == "empty" else low)
            end.append(high)
        low = start[-1]
    return torch.tensor(start, dtype=torch.int32), torch.tensor(end, dtype=torch.int32)


@settings(deadline=None, max_examples=150)
@given(bounds(), st.none() | st.integers(1, 150))
def test_each_visible_pair_is_in_one_call(
    given_bounds: tuple[torch.Tensor, torch.Tensor], block: int | None
) -> None:
    check(*given_bounds, block)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 260), st.integers(1, 3), st.integers(1, 3), st.none() | st.integers(0, 90),
    st.booleans(), st.none() | st.sampled_from([1, 16, 64, 512]),
)  # fmt: skip
def test_masks_on_shards(
    length: int, query_step: int, key_step: int, window: int | None, packed: bool, block: int | None
) -> None:
    everyone = torch.arange(length + 3)
    documents = torch.tensor([0, length // 3, length // 2, length]) if packed else None
    low, high = visible_range(
        everyone[::query_step].contiguous(),
        length,
        causal=True,
        window=window,
        cu_seqlens=documents,
    )
    check(*intervals(low, high, everyone[::key_step].contiguous()), block)


def modes(start: torch.Tensor, end: torch.Tensor) -> list[str]:
    return [call.mode for call in check(start, end, None)]


def test_plain_masks_take_no_mask() -> None:
    rows = torch.arange(200, dtype=torch.int32)
    zero = torch.zeros_like(rows)
    assert modes(zero, zero + 77) == ["full"]
    assert modes(zero, rows + 1) == ["causal"]
    assert modes(zero, rows + 31) == ["full", "causal"]
    assert modes(zero, zero) == []
    assert modes(zero[:MIN_RUN], rows[:MIN_RUN] + 1) == ["causal"]


@pytest.mark.parametrize("rows", [0, 1])
def test_the_smallest(rows: int) -> None:
    one = torch.zeros(rows, dtype=torch.int32)
    assert len(check(one, one + 1, None)) == rows
