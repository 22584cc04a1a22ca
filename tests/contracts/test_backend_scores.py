"""Contract of every backend: scores changed by caps, sinks, biases and dropout."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from ringray_kernels import testing
from ringray_kernels.api import forward
from ringray_kernels.backends import aten, composed
from ringray_kernels.checks import DTYPES
from ringray_kernels.dropout import Dropout, factors
from ringray_kernels.intervals import Positions
from tests.support.backend_problems import (
    DROPOUT_SEED,
    MASKS,
    Problem,
    able,
    hold,
    shared_heads,
)
from tests.support.exhaustive import exhaustive

EVERYONE = torch.arange(61)
WHOLE = [EVERYONE]
# Of keys in another order than that of positions, hops tell positions from rows.
CUT = [EVERYONE[40:], EVERYONE[1:40:2], EVERYONE[:40:2]]
SLOPES = torch.tensor([[0.3, -0.02, 1.5, 0.0], [0.0, 0.7, -0.1, 4.0]])


@pytest.mark.parametrize("mask", ["full", "documents", *exhaustive("causal", "window 17")])
def test_soft_capped_scores(backend: str, mask: str) -> None:
    """Caps that change every score, and one that is far above them."""
    for dtype, softcap in zip(DTYPES, (0.3, 2.0, 50.0), strict=True):
        problem = Problem(
            softcap=softcap, factor=-0.4 if softcap == 2.0 else None, dtype=dtype,
            value_dim=16 if mask == "full" else None, **shared_heads(backend), **MASKS[mask],
        )  # fmt: skip
        hold(backend, problem, WHOLE, CUT)


@pytest.mark.parametrize("mask", ["full", "window and documents", *exhaustive("causal")])
def test_sinks_are_one_more_logit(backend: str, mask: str) -> None:
    for dtype in DTYPES:
        problem = Problem(with_sinks=True, dtype=dtype, **shared_heads(backend), **MASKS[mask])
        hold(backend, problem, WHOLE, CUT, with_out=True)


@pytest.mark.parametrize("mask", ["full", "documents", *exhaustive("causal", "window 17")])
def test_scores_with_a_bias_of_distances(backend: str, mask: str) -> None:
    """Slopes of each head, and of each batch entry and head, with and without a softcap."""
    heads = shared_heads(backend)
    slopes = SLOPES[: heads["batch"], : heads["heads"]]
    for dtype, entries in zip(DTYPES, (False, True, True), strict=True):
        problem = Problem(
            slopes=slopes if entries else slopes[0], softcap=1.5 if entries else None, dtype=dtype,
            factor=None if entries else -0.4, **heads, **MASKS[mask],
        )  # fmt: skip
        hold(backend, problem, WHOLE, CUT)


@pytest.mark.parametrize("reach", [3, *exhaustive(0, 100)])
def test_learned_biases_of_distances(backend: str, reach: int) -> None:
    """Tables that end before the keys do and beyond; with their gradients."""
    heads = shared_heads(backend)
    table = testing.make_table(heads["heads"], reach, seed=1)
    asked: tuple[dict[str, Any], ...] = (
        {"causal": False}, {"softcap": 1.5, "factor": -0.4}, {"cu": (0, 20, 61)},
    )  # fmt: skip
    for dtype, options in zip(DTYPES, asked, strict=True):
        hold(backend, Problem(table=table, dtype=dtype, **heads, **options), WHOLE, CUT)


def test_changed_scores_of_many_blocks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed, "SCORES_AT_ONCE", 1 << 12)
    heads = shared_heads(backend)
    slopes, table = SLOPES[0, : heads["heads"]], testing.make_table(heads["heads"], 9, seed=2)
    for changed in ({"softcap": 1.5}, {"slopes": slopes}, {"table": table}):
        hold(backend, Problem(rows=177, head_dim=16, **heads, **changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", ["full", *exhaustive("causal"), "window and documents"])
def test_dropped_weights(backend: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights for any order of hops, of rows and of keys, and any blocks."""
    monkeypatch.setattr(composed, "SCORES_AT_ONCE", 1 << 12)
    monkeypatch.setattr(aten, "ELEMENTS_PER_CALL", 3 * 61 * 32)  # slices across batch rows
    for dtype, parts in itertools.product(DTYPES, (WHOLE, CUT)):
        problem = Problem(
            dropout_p=0.3, dtype=dtype, with_sinks=dtype == torch.float16,
            softcap=2.0 if parts is WHOLE else None, **shared_heads(backend), **MASKS[mask],
        )  # fmt: skip
        hold(backend, problem, parts)


def test_dropped_weights_are_the_same_for_all_backends(backend: str) -> None:
    """At any heads and positions: values of one row each show which weights stay."""
    problem = Problem(rows=64, heads=3, kv_heads=3, causal=False, head_dim=64)
    if not able(backend, replace(problem, dropout_p=0.5)):
        return
    q, k, v = torch.zeros(3, 2, 3, 64, 64)
    v[:] = torch.eye(64)
    at = torch.arange(7, 135, 2, dtype=torch.int32)
    dropout = Dropout(0.5, DROPOUT_SEED, head=5)
    out, _ = forward(
        q, k, v, torch.zeros(1, 64, dtype=torch.int32), torch.full((1, 64), 64, dtype=torch.int32),
        scale=1.0, dropout=dropout, at=Positions(at, at + 1), backend=backend,
    )  # fmt: skip
    every = torch.arange(140)
    want = factors(
        dropout._replace(head=0), torch.arange(2)[:, None], torch.arange(8), every, every
    )
    assert torch.equal(out > 0, want[:, 5:, 7:135:2, 8:136:2] > 0)
