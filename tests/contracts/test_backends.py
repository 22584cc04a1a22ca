"""Contract of every registered backend: attention on intervals, within the error budget.

A backend that cannot compute on this machine's tensors is skipped. Sizes are at least 61 rows: on
less, the yardstick's own error is a matter of luck.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import ringray_kernels
from ringray_kernels import Blocks, State
from ringray_kernels.api import backward, forward
from ringray_kernels.backends import BLOCKS
from ringray_kernels.checks import DTYPES
from tests.support.backend_problems import (
    LAYOUTS,
    MASKS,
    NAN,
    Problem,
    both,
    check,
    compute,
    hidden_may_hold_anything,
    hold,
    interpreted,
    layouts,
    shared_heads,
)
from tests.support.exhaustive import exhaustive

EVERYONE = torch.arange(61)
HALVES = [EVERYONE[::2].contiguous(), EVERYONE[1::2].contiguous()]


@pytest.mark.parametrize(
    "case",
    [
        *zip(MASKS, itertools.cycle(DTYPES), itertools.cycle((1, 2, 4, 2)), strict=False),
        *exhaustive(*itertools.product(MASKS, DTYPES, (1, 2, 4))),
    ],
    ids=str,
)
def test_masks_dtypes_and_shared_heads(backend: str, case: tuple[str, torch.dtype, int]) -> None:
    mask, dtype, kv_heads = case
    hold(backend, Problem(heads=4, kv_heads=kv_heads, dtype=dtype, **MASKS[mask]))


@pytest.mark.parametrize(
    "head_dim", [1, 33, 100, 256, 512, *exhaustive(2, 7, 8, 16, 64, 128, 192, 255, 300)]
)
def test_head_dims(backend: str, head_dim: int) -> None:
    for dtype in DTYPES[1:2] if interpreted(backend) else DTYPES:
        hold(backend, Problem(head_dim=head_dim, dtype=dtype, kv_heads=1))


@pytest.mark.parametrize(
    "dims", [(192, 128), (16, 33), *exhaustive((100, 16), (24, 512), (1, 64))], ids=str
)
def test_values_of_another_head_dim(backend: str, dims: tuple[int, int]) -> None:
    """MLA's keys are wider than its values; and parts of all hops are merged."""
    head_dim, value_dim = dims
    for dtype in DTYPES[1:2] if interpreted(backend) else DTYPES:
        problem = Problem(head_dim=head_dim, value_dim=value_dim, dtype=dtype, kv_heads=1)
        hold(backend, problem, HALVES, with_out=True)
        if not interpreted(backend):  # it makes no use of out
            hold(backend, problem, HALVES)


# Values of each type of ``blocks``: few blocks and many.
CUTS: dict[type, list[Any]] = {
    int: [None, 1, 16, 100],
    Blocks: [
        None,
        *map(
            Blocks.parse,
            (
                "forward=16x16/4/2,dq=16x16/4/2,dkv=16x16/4/2",
                "forward=64x32/4/2,dq=32x64/4/2,dkv=64x32/4/2",
                "forward=32x128/4/2/descriptors,dq=128x32/4/2/descriptors,dkv=32x16/4/2/descriptors",
            ),
        ),
    ],
}


@pytest.mark.parametrize("cut", [2, 3, *exhaustive(0, 1)])
def test_long_enough_for_several_calls(backend: str, cut: int) -> None:
    blocks = CUTS[Blocks if BLOCKS[backend] == "tiles" else int][cut]
    for mask in ({}, {"window": 130}, {"causal": False, "cu": (0, 201, 777)}):
        rows = 77 if blocks == 1 else 177 if interpreted(backend) else 777
        changed = {**mask, "cu": (0, 20, rows)} if "cu" in mask else mask
        hold(backend, Problem(rows=rows, head_dim=16, blocks=blocks, **changed))


@pytest.mark.parametrize(
    "case",
    [
        ("causal", True), ("window and documents", True), ("global tokens", True),
        ("documents", False), *exhaustive(*itertools.product(MASKS, (True, False))),
    ],
    ids=str,
)  # fmt: skip
def test_hops_are_merged_into_attention_over_all_keys(backend: str, case: tuple[str, bool]) -> None:
    """Keys in interleaved parts, so that rows see nothing in some of them."""
    mask, with_out = case
    if interpreted(backend) and not with_out:
        pytest.skip("this backend makes no use of out")
    for dtype in DTYPES[:1] if interpreted(backend) else DTYPES:
        problem = Problem(dtype=dtype, **shared_heads(backend), **MASKS[mask])
        neighbours = [EVERYONE[40:], EVERYONE[:20], EVERYONE[20:40]]
        quarters = [EVERYONE[i::4].contiguous() for i in (3, 0, 2, 1)]
        hold(backend, problem, HALVES, neighbours, quarters, with_out=with_out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chosen", [(0, 1, 2, 3), *exhaustive((0,), (1, 2), (3,))], ids=str)
def test_any_strides(backend: str, layout: str, chosen: tuple[int, ...]) -> None:
    heads = shared_heads(backend) | {"batch": 2}  # of which every other one may be taken
    for dtype in (torch.float32, torch.bfloat16):
        problem = Problem(dtype=dtype, window=20, **heads)
        q, k, v, dout = (
            layouts(x)[layout] if i in chosen else x for i, x in enumerate(problem.inputs)
        )
        check(problem, compute(backend, problem, (q, k, v, dout)), f"{chosen} as {layout}")


def test_each_batch_entry_may_have_its_own_intervals(backend: str) -> None:
    masks = [{}, {"window": 9}, {"causal": False, "cu": (0, 30, 61)}, {"window": 0}]
    problems = [Problem(batch=4, heads=2, kv_heads=1, **mask) for mask in masks]
    q, k, v, dout = problems[0].inputs
    bounds = [problem.intervals(torch.arange(61)) for problem in problems]
    start, end = (torch.cat([one[i] for one in bounds]) for i in (0, 1))
    got = both(backend, (q, k, v, dout), start, end, scale=problems[0].scale)
    for b, problem in enumerate(problems):
        want = compute(backend, problem, (q, k, v, dout))
        for x, y in zip(got, (want.out, want.lse, *want.grads.values()), strict=True):
            torch.testing.assert_close(x[b], y[b], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        *itertools.product([(0, 20), (20, 41), (0, 61)], DTYPES[:1]),
        *exhaustive(*itertools.product([(20, 41)], DTYPES[1:])),
    ],
    ids=str,
)
def test_hidden_rows_and_keys_may_hold_anything(
    backend: str, case: tuple[tuple[int, int], torch.dtype]
) -> None:
    """Padding stands at a shard's end; a window also hides the keys before it."""
    (first, stop), dtype = case
    problem = Problem(batch=2, heads=4, kv_heads=2, dtype=dtype)
    rows = torch.arange(61, dtype=torch.int32)
    start = torch.where(rows < first, 7, torch.where(rows < stop, rows + 1, stop)).int()[None]
    end = torch.maximum(start, (rows + 1).clamp(7, 50))
    hidden_may_hold_anything(backend, problem.inputs, start, end, scale=problem.scale)


def test_gradients_are_added_to_what_is_there(backend: str) -> None:
    problem = Problem(batch=2, heads=4, kv_heads=2)
    asked = (backend, problem.inputs, *problem.intervals(EVERYONE))
    want, got = (both(*asked, scale=problem.scale, filled=x) for x in (0.0, 100.0))
    for x, y in zip(got[2:], want[2:], strict=True):
        torch.testing.assert_close(x - 100.0, y, atol=2e-4, rtol=1e-4)


def test_identical_runs_are_bitwise_equal(backend: str) -> None:
    for dtype in DTYPES:
        problem = Problem(rows=130, dtype=dtype, window=50, **shared_heads(backend))
        a, b = (compute(backend, problem, problem.inputs) for _ in range(2))
        assert torch.equal(a.out, b.out)
        assert torch.equal(a.lse, b.lse)
        assert all(torch.equal(a.grads[name], b.grads[name]) for name in a.grads)


def test_extreme_scores_give_no_nan(backend: str) -> None:
    problem = Problem(rows=64)
    q, k, v, dout = problem.inputs
    result = compute(backend, problem, (q * 200, k * 200, v, dout))
    for x in (result.out, result.lse, *result.grads.values()):
        assert x.isfinite().all()


def test_more_and_fewer_keys_than_queries(backend: str) -> None:
    for rows, keys in ((1, 129), (5, 3), (64, 1), (64, 129)):
        q, k, v, dout = (torch.randn(2, 2, n, 16) for n in (rows, keys, keys, rows))
        start = torch.zeros(1, rows, dtype=torch.int32)
        end = torch.full((1, rows), keys, dtype=torch.int32)
        got, want = (
            both(x, (q, k, v, dout), start, end, scale=0.3) for x in (backend, "reference")
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        (0.0, "causal"), (-0.2, "window and documents"), (-1e-200, "causal"),
        *exhaustive(
            *itertools.product(
                (0.0, -0.2, -1.0, 3, 1e-45, -1e-200, -2e-38), ("causal", "window and documents")
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_every_finite_scale(backend: str, case: tuple[float, str]) -> None:
    """Fused calls scale after masking, which only a positive scale survives."""
    factor, mask = case
    for dtype in DTYPES[:1] if interpreted(backend) else DTYPES:
        rows = 61 if interpreted(backend) or mask != "causal" else 131  # enough for causal calls
        more = {"rows": rows, "factor": factor, **MASKS[mask]}
        problem = Problem(heads=4, kv_heads=2, dtype=dtype, **more)
        everyone = torch.arange(rows)
        parts = [everyone], [everyone[::2].contiguous(), everyone[1::2].contiguous()]
        for with_out in (True,) if interpreted(backend) else (True, False):
            hold(backend, problem, *parts, with_out=with_out)


def test_other_scales_are_refused(backend: str) -> None:
    factors: tuple[Any, ...] = (NAN, -float("inf"), 1e39, 10**400, "1", True)
    for factor in factors:
        problem = Problem(factor=factor)
        with pytest.raises(ValueError, match=r"scale: got .* expected None or a finite number"):
            compute(backend, problem, problem.inputs)


def test_the_gradient_of_lse(backend: str) -> None:
    """One more term of delta, for rows with keys; in hops, and whatever rows without keys hold."""
    for dtype in (torch.float32, torch.bfloat16):
        problem = Problem(heads=4, kv_heads=2, dtype=dtype, window=9)
        q, k, *_ = problem.inputs
        state, dq, dk, _ = _with_dlse(backend, problem, rows := torch.randn(1, 4, 61))
        leaves = [x.double().requires_grad_() for x in (q, k)]
        scores = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * problem.scale
        lse = torch.logsumexp(scores.masked_fill(~problem.seen, -torch.inf), -1)
        want = torch.autograd.grad(lse, leaves, rows.double())
        loose = 1e-5 if dtype == torch.float32 else 2e-2
        for got, true in zip((dq, dk), want, strict=True):
            torch.testing.assert_close(got.double(), true, atol=loose, rtol=loose)
        assert torch.equal(state.lse, _with_dlse(backend, problem, rows)[0].lse)


def _with_dlse(
    backend: str, problem: Problem, dlse: Tensor
) -> tuple[State, Tensor, Tensor, Tensor]:
    """The gradients of lse alone, in two hops."""
    q, k, v, dout = problem.inputs
    more: dict[str, Any] = {"scale": problem.scale, "backend": backend}
    everyone = torch.arange(problem.rows)
    state: State | None = None
    for part in (everyone[::2], everyone[1::2]):
        start, end = problem.intervals(part.contiguous())
        state = forward(
            q, k[:, :, part], v[:, :, part], start, end, state=state,
            out_dtype=q.dtype if len(part) == 30 else None, **more,
        )  # fmt: skip
    nothing = torch.zeros_like(dout)
    delta = ringray_kernels.delta(nothing, state.out, state.lse, dlse, backend=backend)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    for part in (everyone[::2], everyone[1::2]):
        start, end = problem.intervals(part.contiguous())
        some = [torch.zeros_like(x[:, :, part]) for x in (dk, dv)]
        backward(
            nothing, q, k[:, :, part], v[:, :, part], state.lse, delta, start, end, dq=dq,
            dk=some[0], dv=some[1], **more,
        )  # fmt: skip
        dk[:, :, part] += some[0]
    return state, dq, dk, dv
