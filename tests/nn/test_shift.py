"""``ringray.shift``: rows of tokens some places on, across the edges of shards."""

from __future__ import annotations

import pytest
import torch

import ringray
from tests.support import shift_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring

EVERY = (
    checks.is_exact,
    checks.every_dtype,
    checks.fills_are_kept,
    checks.gradients_have_gradients,
    checks.labels_two_tokens_on,
    checks.is_compiled,
)


@pytest.mark.parametrize("size", [3, *exhaustive(1, 2)])
def test_rings(size: int) -> None:
    on_ring(size, EVERY)


def test_one_and_four() -> None:
    on_ring(4, (checks.is_exact,))


def test_without_a_group() -> None:
    x = torch.arange(6)[None]
    assert ringray.shift(x, 2, dim=1).tolist() == [[2, 3, 4, 5, 0, 0]]
    assert ringray.shift(x, -1, dim=1, fill=-1).tolist() == [[-1, 0, 1, 2, 3, 4]]
    cut = ringray.shift(x, 1, dim=1, cu_seqlens=[0, 2, 6], fill=9)
    assert cut.tolist() == [[1, 9, 3, 4, 5, 9]]
    shorter = ringray.shift(x, 1, dim=1, seq_len=5, fill=7)
    assert shorter.tolist() == [[1, 2, 3, 4, 7, 7]]
