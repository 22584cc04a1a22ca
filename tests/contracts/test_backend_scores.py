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
    check,
    compute,
    shared_heads,
)
from tests.support.exhaustive import exhaustive


@pytest.mark.parametrize("mask", ["full", "documents", *exhaustive("causal", "window 17")])
def test_soft_capped_scores(backend: str, mask: str) -> None:
    """Caps that change every score, and one that is far above them."""
    everyone = torch.arange(61)
    for dtype, softcap in zip(DTYPES, (0.3, 2.0, 50.0), strict=True):
        problem = Problem(
            softcap=softcap, factor=-0.4 if softcap == 2.0 else None, dtype=dtype,
            value_dim=16 if mask == "full" else None, **shared_heads(backend), **MASKS[mask],
        )  # fmt: skip
        if not able(backend, problem):
            continue
        for parts in ([everyone], [everyone[40:], everyone[:40]]):
            result = compute(backend, problem, problem.inputs, parts, with_out=len(parts) == 1)
            check(problem, result, f"{len(parts)} parts")


def test_soft_capped_scores_of_many_blocks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed, "SCORES_AT_ONCE", 1 << 12)
    problem = Problem(rows=177, head_dim=16, softcap=1.5, **shared_heads(backend))
    if able(backend, problem):
        check(problem, compute(backend, problem, problem.inputs))


@pytest.mark.parametrize("mask", ["full", "window and documents", *exhaustive("causal")])
def test_sinks_are_one_more_logit(backend: str, mask: str) -> None:
    everyone = torch.arange(61)
    for dtype in DTYPES:
        problem = Problem(with_sinks=True, dtype=dtype, **shared_heads(backend), **MASKS[mask])
        for parts in ([everyone], [everyone[::2].contiguous(), everyone[1::2].contiguous()]):
            check(problem, compute(backend, problem, problem.inputs, parts), f"{len(parts)} parts")


SLOPES = torch.tensor([[0.3, -0.02, 1.5, 0.0], [0.0, 0.7, -0.1, 4.0]])


@pytest.mark.parametrize("mask", ["full", "documents", *exhaustive("causal", "window 17")])
def test_scores_with_a_bias_of_distances(backend: str, mask: str) -> None:
    """Slopes of each head, and of each batch entry and head, with and without a softcap."""
    everyone, heads = torch.arange(61), shared_heads(backend)
    for dtype, entries in zip(DTYPES, (False, True, True), strict=True):
        slopes = SLOPES[: heads["batch"], : heads["heads"]]
        problem = Problem(
            slopes=slopes if entries else slopes[0], softcap=1.5 if entries else None, dtype=dtype,
            factor=None if entries else -0.4, **heads, **MASKS[mask],
        )  # fmt: skip
        if not able(backend, problem):
            continue
        # Of keys in another order than that of positions, hops tell positions from rows.
        for parts in ([everyone], [everyone[40:], everyone[1:40:2], everyone[:40:2]]):
            result = compute(backend, problem, problem.inputs, parts, with_out=len(parts) == 1)
            check(problem, result, f"{len(parts)} parts")


@pytest.mark.parametrize("reach", [3, *exhaustive(0, 100)])
def test_learned_biases_of_distances(backend: str, reach: int) -> None:
    """Tables that end before the keys do and beyond; with their gradients."""
    everyone, heads = torch.arange(61), shared_heads(backend)
    asked: tuple[dict[str, Any], ...] = (
        {"causal": False}, {"softcap": 1.5, "factor": -0.4}, {"cu": (0, 20, 61)},
    )  # fmt: skip
    for dtype, options in zip(DTYPES, asked, strict=True):
        table = testing.make_table(heads["heads"], reach, seed=1)
        problem = Problem(table=table, dtype=dtype, **heads, **options)
        if not able(backend, problem):
            continue
        for parts in ([everyone], [everyone[40:], everyone[1:40:2], everyone[:40:2]]):
            result = compute(backend, problem, problem.inputs, parts, with_out=len(parts) == 1)
            check(problem, result, f"{len(parts)} parts")


def test_biased_scores_of_many_blocks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composed, "SCORES_AT_ONCE", 1 << 12)
    heads = shared_heads(backend)
    biases = ({"slopes": SLOPES[0, : heads["heads"]]}, {"table": testing.make_table(4, 9, seed=2)})
    for bias in biases:
        of_heads = {name: x[: heads["heads"]] for name, x in bias.items()}
        problem = Problem(rows=177, head_dim=16, **of_heads, **heads)
        if able(backend, problem):
            check(problem, compute(backend, problem, problem.inputs))


@pytest.mark.parametrize("mask", ["full", *exhaustive("causal"), "window and documents"])
def test_dropped_weights(backend: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights for any order of hops, of rows and of keys, and any blocks."""
    monkeypatch.setattr(composed, "SCORES_AT_ONCE", 1 << 12)
    monkeypatch.setattr(aten, "ELEMENTS_PER_CALL", 3 * 61 * 32)  # slices across batch rows
    everyone = torch.arange(61)
    parts = {"one": [everyone], "striped": [everyone[1::3], everyone[::3], everyone[2::3]]}
    for dtype, (name, keys) in itertools.product(DTYPES, parts.items()):
        problem = Problem(
            dropout_p=0.3, dtype=dtype, with_sinks=dtype == torch.float16,
            softcap=2.0 if name == "one" else None, **shared_heads(backend), **MASKS[mask],
        )  # fmt: skip
        if able(backend, problem):
            result = compute(backend, problem, problem.inputs, keys, with_out=name == "one")
            check(problem, result, name)


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
