"""The warp-specialised kernel in a model of its hardware: results, and the barrier protocol."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from ringray_kernels import State, forward
from ringray_kernels.intervals import intervals, visible_range
from tests.kernels import gluon_model

MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 70},
    "documents": {"causal": True, "cu": (0, 5, 150, 333)},
    "full documents": {"causal": False, "cu": (0, 140, 333)},
}


def problem(
    mask: str, rows: int, keys: int, heads: int = 2, kv_heads: int = 1, width: int = 32
) -> tuple[Any, ...]:
    """q, k, v (fp16) and intervals of ``rows`` queries at the end of ``keys`` positions."""
    generator = torch.Generator().manual_seed(rows + keys)
    q, k, v = (
        torch.randn(1, h, n, width, generator=generator).half()
        for h, n in ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    )
    given = dict(MASKS[mask])
    cu = given.pop("cu", None)
    if cu is not None:
        cu = torch.tensor([*(c for c in cu if c < keys), keys])
    positions = torch.arange(keys)
    low, high = visible_range(positions[-rows:], keys, cu_seqlens=cu, **given)
    start, end = intervals(low, high, positions)
    return q, k, v, start[None], end[None]


def check(got: tuple[np.ndarray, np.ndarray], want: State) -> None:
    out, lse = (torch.from_numpy(x) for x in got)
    torch.testing.assert_close(out, want.out.float(), atol=3e-3, rtol=3e-3)
    torch.testing.assert_close(lse, want.lse, atol=1e-3, rtol=1e-4)


def computed(inputs: tuple[Any, ...], block: int, stages: int, **more: Any) -> Any:
    q, k, v, start, end = (x.numpy() for x in inputs)
    state = more.pop("state", None)
    return gluon_model.run_forward(q, k, v, start, end, 0.2, state, block, stages, **more)


@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_lengths(mask: str) -> None:
    for (rows, keys), stages in itertools.product(((1, 1), (130, 333), (200, 200)), (2, 3)):
        inputs = problem(mask, rows, keys)
        check(computed(inputs, 32, stages), forward(*inputs, scale=0.2, backend="reference"))


def test_hops_are_merged() -> None:
    q, k, v, start, end = problem("causal", 150, 333)
    state: Any = None
    for first, stop in ((0, 100), (100, 101), (101, 333)):
        part = [x.clamp(first, stop) - first for x in (start, end)]
        cut = (q, k[:, :, first:stop].clone(), v[:, :, first:stop].clone(), *part)
        state = computed(cut, 32, 2, state=state)
    check(state, forward(q, k, v, start, end, scale=0.2, backend="reference"))


def test_what_nobody_sees_may_hold_anything() -> None:
    q, k, v, start, end = problem("causal", 140, 200)
    start, end = start.clamp(0, 111), end.clamp(0, 111)
    want = forward(q, k, v, start, end, scale=0.2, backend="reference")
    k[:, :, 111:], v[:, :, 111:] = float("nan"), float("inf")
    check(computed((q, k, v, start, end), 32, 2), want)


def test_rows_that_see_nothing() -> None:
    q, k, v, start, end = problem("causal", 140, 200)
    end[0, :50] = start[0, :50]
    q[:, :, :50] = float("nan")
    out, lse = computed((q, k, v, start, end), 32, 2)
    assert (out[:, :, :50] == 0).all()
    assert (lse[:, :, :50] == -np.inf).all()
    assert np.isfinite(out).all()


READ = "            acc = warpgroup_mma_wait(0, deps=[acc_next])\n"
FREED = "            mbarrier.arrive(v_empty.index(before), count=1)\n"
SLEEP = "            import time; time.sleep(0.05)\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (READ + FREED, FREED + SLEEP + READ),
        (FREED, ""),
        ("((before // STAGES) & 1) ^ 1", "(before // STAGES) & 1"),
    ],
    ids=["freed before it was read", "never freed", "wrong phase"],
)
def test_the_model_finds_broken_protocols(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon_model, "PATIENCE_S", 1.0)
    inputs = problem("full", 128, 333, heads=1)
    want = forward(*inputs, scale=0.2, backend="reference")
    with pytest.raises(AssertionError):
        check(computed(inputs, 32, 2, replace={old: new}), want)
