"""merge(A, B) = attention(A ∪ B), also for rows that see nothing on one or both sides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringray_kernels.merge import merge_

INF = float("inf")


def attention(scores: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) over the keys that ``scores`` (rows, keys) holds; -inf scores are unseen."""
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -INF, 0.0)[:, None])
    return weights @ v, lse


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**31), st.floats(0, 1), st.sampled_from([1.0, 30.0, 1e4]))
def test_merging_is_attention_over_both(seed: int, share: float, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(33, 20, generator=generator, dtype=torch.float64) * size
    v = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    scores[torch.rand(33, 20, generator=generator) < share] = -INF
    want, want_lse = attention(scores, v)
    cut = seed % 21
    out, lse = (x.float() for x in attention(scores[:, :cut], v[:cut]))
    part, part_lse = (x.float() for x in attention(scores[:, cut:], v[cut:]))
    merge_(out, lse, part, part_lse)
    torch.testing.assert_close(out.double(), want, atol=3e-3 * (size > 100) + 3e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sides_that_see_nothing(dtype: torch.dtype) -> None:
    out = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [1.0, 2.0]])
    lse = torch.tensor([-INF, 3.0, -INF, 0.0])
    part = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0]], dtype=dtype)
    part_lse = torch.tensor([2.0, -INF, -INF, 0.0])
    merge_(out, lse, part, part_lse)
    assert out.tolist() == [[3.0, 4.0], [1.0, 2.0], [0.0, 0.0], [2.0, 3.0]]
    assert lse.tolist() == [2.0, 3.0, -INF, pytest.approx(0.693147, abs=1e-6)]


def test_it_writes_through_views() -> None:
    """Heads and rows are slices of larger tensors."""
    out, lse = torch.zeros(4, 6, 3), torch.full((4, 6), -INF)
    merge_(out[1:3, 2:5], lse[1:3, 2:5], torch.ones(2, 3, 3), torch.zeros(2, 3))
    assert float(out.sum()) == 18
    assert int((lse == 0).sum()) == 6


@pytest.mark.parametrize("size", [10.0, 100.0, 1e4])
def test_the_stated_limit_of_exact_scores(size: float) -> None:
    """16 parts with 1 to 16 keys of one score: a part and a merge round lse once each."""
    v = torch.randn(136, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out, lse = torch.zeros(1, 1), torch.tensor([-INF])
    for part in v.split(list(range(1, 17))):
        mean, found = attention(torch.full((1, len(part)), size, dtype=torch.float64), part)
        merge_(out, lse, mean.float(), found.float())
    limit = 2 * 16 * 2**-24 * (size + 5) * float(v.abs().max())
    assert float((out - v.mean(0)).abs()) <= limit + 1e-6
