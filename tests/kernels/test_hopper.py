"""The warp-specialised kernels in a model of their hardware: results, and barrier protocols."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from ringray_kernels import State, backward, delta, forward
from ringray_kernels.backends.triton.plan import tile_plan
from ringray_kernels.intervals import intervals, inverse, visible_range
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
    for rows, keys, stages in ((1, 1, 2), (130, 333, 3), (200, 200, 2)):
        inputs = problem(mask, rows, keys)
        got = computed(inputs, 32, stages)
        check(got, forward(*inputs, scale=0.2, backend="reference"))


def test_bounds_by_batch_entry() -> None:
    inputs = zip(problem("causal", 150, 333), problem("window", 150, 333), strict=True)
    both = tuple(torch.cat(pair) for pair in inputs)
    check(computed(both, 32, 2), forward(*both, scale=0.2, backend="reference"))


@pytest.mark.parametrize("mask", MASKS)
def test_plans(mask: str) -> None:
    """Against the intervals of each block, row by row."""
    *_, start, end = problem(mask, 333, 333)
    both = torch.cat([start, start.clamp(max=100)]), torch.cat([end, end.clamp(max=100)])
    plan = tile_plan(*both, 128, 32)
    assert tile_plan(*both, 128, 32) is plan
    head, *blocks = plan.tolist()
    assert head[:2] == [sum(one[6] > 0 for one in blocks), 6]
    assert sorted((one[0], one[1]) for one in blocks) == list(itertools.product(range(2), range(3)))
    counts = [one[6] for one in blocks]
    assert counts == sorted(counts, reverse=True)
    for entry, block, low, high, leading, whole, count, gaps in blocks:
        rows = range(128 * block, min(128 * block + 128, 333))
        seen = [set(range(both[0][entry, r], both[1][entry, r])) for r in rows]
        union, common = set().union(*seen), set(range(333)).intersection(*seen)
        assert union <= set(range(low, high))
        assert gaps or union == set(range(low, high))
        assert count == -(-(high - low) // 32)
        for tile in range(count):
            keys = set(range(low + 32 * tile, low + 32 * tile + 32))
            assert (keys <= common) == (leading <= tile < leading + whole)
    both[0][1, 0] = 0
    both[1][1, 0] = 333
    assert tile_plan(*both, 128, 32) is not plan


def test_hops_are_merged() -> None:
    q, k, v, start, end = problem("causal", 150, 333)
    state: Any = None
    for first, stop in ((0, 100), (100, 101), (101, 333)):
        part = [x.clamp(first, stop) - first for x in (start, end)]
        cut = (q, k[:, :, first:stop].clone(), v[:, :, first:stop].clone(), *part)
        state = computed(cut, 32, 2, state=state)
    check(state, forward(q, k, v, start, end, scale=0.2, backend="reference"))


def beyond() -> tuple[Any, ...]:
    """Keys from 111 on are seen by nobody and hold NaN."""
    q, k, v, start, end = problem("causal", 140, 200)
    k[:, :, 111:], v[:, :, 111:] = float("nan"), float("inf")
    return q, k, v, start.clamp(0, 111), end.clamp(0, 111)


def gap() -> tuple[Any, ...]:
    """A block whose rows see keys before 40 or from 100 on; the keys between hold NaN."""
    q, k, v, start, end = problem("full", 140, 200)
    end[0, :70] = 40
    start[0, 70:] = 100
    k[:, :, 40:100], v[:, :, 40:100] = float("nan"), float("inf")
    return q, k, v, start, end


@pytest.mark.parametrize("hidden", [beyond, gap])
def test_what_nobody_sees_may_hold_anything(hidden: Any) -> None:
    q, k, v, start, end = hidden()
    want = forward(q, k.nan_to_num(), v.nan_to_num(posinf=0), start, end, scale=0.2,
                   backend="reference")  # fmt: skip
    check(computed((q, k, v, start, end), 32, 2), want)


def test_rows_that_see_nothing() -> None:
    q, k, v, start, end = problem("causal", 140, 200)
    end[0, :50] = start[0, :50]
    q[:, :, :50] = float("nan")
    out, lse = computed((q, k, v, start, end), 32, 2)
    assert (out[:, :, :50] == 0).all()
    assert (lse[:, :, :50] == -np.inf).all()
    assert np.isfinite(out).all()


@pytest.mark.parametrize("at", [31, 200])
def test_a_hop_in_which_nobody_sees_anything(at: int) -> None:
    """The position of empty intervals must not matter."""
    q, k, v, start, _ = problem("causal", 140, 200)
    nothing = torch.full_like(start, at)
    k[:], v[:] = float("nan"), float("nan")
    out, lse = computed((q, k, v, nothing, nothing), 32, 2)
    assert (out == 0).all()
    assert (lse == -np.inf).all()
    found = np.random.default_rng(0).standard_normal((*q.shape[:3], 33)).astype(np.float32)
    state = found[..., :32].copy(), found[..., 32].copy()
    out, lse = computed((q, k, v, nothing, nothing), 32, 2, state=state, last=True)
    np.testing.assert_allclose(out, found[..., :32], rtol=1e-6)
    np.testing.assert_allclose(lse, found[..., 32], rtol=1e-6, atol=1e-6)


READ = "            acc = warpgroup_mma_wait(0, deps=[acc_next])\n"
FREED = "            mbarrier.arrive(v_empty.index(before), count=1)\n"
SLEEP = "            import time; time.sleep(0.05)\n"


def differentiated(
    inputs: tuple[Any, ...], block: int, stages: int, **more: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(got, wanted) of dq, dk and dv, added to ones."""
    q, k, v, start, end = inputs
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).half()
    blind = (start >= end)[0]
    dout[:, :, blind] = 0.0
    clean = q.nan_to_num()
    state = forward(clean, k, v, start, end, scale=0.2, backend="reference", out_dtype=q.dtype)
    rows = delta(dout, state.out, state.lse, backend="reference")
    want = [torch.ones(clean.shape), torch.ones(k.shape), torch.ones(v.shape)]
    backward(
        dout, clean, k, v, state.lse, rows, start, end, scale=0.2, dq=want[0], dk=want[1],
        dv=want[2], backend="reference",
    )  # fmt: skip
    dout[:, :, blind] = rows[:, :, blind] = float("nan")
    k, v = more.pop("poisoned", (k, v))
    first, stop = (x[None].numpy() for x in inverse(start[0], end[0], k.shape[2]))
    dq, dk, dv = torch.ones(q.shape), torch.ones(k.shape), torch.ones(v.shape)
    common = [x.numpy() for x in (dout, q, k, v, state.lse, rows)]
    gluon_model.run_dkv(*common, first, stop, dk.numpy(), dv.numpy(), 0.2, block, stages, **more)
    gluon_model.run_dq(
        *common, start.numpy(), end.numpy(), dq.numpy(), 0.2, block, stages + 1, **more
    )
    return [(dq, want[0]), (dk, want[1]), (dv, want[2])]


def gradients_are_right(inputs: tuple[Any, ...], **settings: Any) -> None:
    for got, want in differentiated(inputs, 32, 2, **settings):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=5e-3)


@pytest.mark.parametrize("mask", MASKS)
def test_gradients(mask: str) -> None:
    for rows, keys, kv_heads in ((1, 1, 1), (130, 333, 1), (96, 96, 2)):
        gradients_are_right(problem(mask, rows, keys, kv_heads=kv_heads))


def test_gradients_where_rows_see_nothing() -> None:
    """Before all others, and between two documents, within the span of a block of keys."""
    q, k, v, start, end = problem("causal", 200, 200)
    for blind, at in ((slice(0, 50), 0), (slice(100, 110), 100)):
        start[0, blind.start :] = at
        end[0, blind] = at
        q[:, :, blind] = float("nan")
    gradients_are_right((q, k, v, start, end))


def test_gradients_beside_what_lies_between() -> None:
    """Keys and values that no row sees."""
    q, k, v, start, end = gap()
    clean = (q, k.nan_to_num(), v.nan_to_num(posinf=0), start, end)
    gradients_are_right(clean, poisoned=(k, v))


DKV_READ = "            sum_k, sum_v = warpgroup_mma_wait(0, deps=[sum_k, sum_v])\n"
DKV_FREED = "            mbarrier.arrive(empty.index(slot), count=1)\n"
DQ_READ = "            dp, acc = warpgroup_mma_wait(0, deps=[dp_next, acc_next])\n"
DQ_FREED = "            mbarrier.arrive(empty.index(before), count=1)\n" + SLEEP


@pytest.mark.parametrize(
    ("pass_", "old", "new"),
    [
        ("forward", READ + FREED, FREED + SLEEP + READ),
        ("forward", FREED, ""),
        ("forward", "mbarrier.wait(v_empty.index(slot), ((before // STAGES) & 1) ^ 1",
         "mbarrier.wait(v_empty.index(slot), (before // STAGES) & 1"),
        ("forward", "warpgroup_mma_wait(1, deps=[s_next])", "warpgroup_mma_wait(2, deps=[s_next])"),
        ("backward", DKV_READ + DKV_FREED, DKV_FREED + SLEEP + DKV_READ),
        ("backward", DQ_READ, DQ_READ.replace("wait(0", "wait(1")),
        ("backward", DQ_READ, DQ_FREED + DQ_READ),
        ("backward", "count=1)\n\n\n@gluon.jit\ndef _compute_dkv",
         "count=0)\n\n\n@gluon.jit\ndef _compute_dkv"),
    ],
    ids=[
        "freed before it was read", "never freed", "wrong phase", "not waited for",
        "of keys freed early", "dq not waited for", "freed twice", "sums not there",
    ],
)  # fmt: skip
def test_the_model_finds_broken_protocols(
    pass_: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon_model, "PATIENCE_S", 1.0)
    inputs = problem("full", 256, 333, heads=1)

    def attempt() -> None:
        if pass_ == "forward":
            want = forward(*inputs, scale=0.2, backend="reference")
            check(computed(inputs, 32, 2, replace={old: new}), want)
        else:
            gradients_are_right(inputs, replace={old: new})

    with pytest.raises(AssertionError):
        attempt()
