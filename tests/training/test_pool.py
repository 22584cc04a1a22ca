"""One pool of ranks in place of DP x CP: its documents choose their ring."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ringray.training.recipe import Degrees, Recipe, check
from tests.support import pool_checks as pool
from tests.support import training_checks
from tests.support.ranks import on_ring


def test_a_pool_trains_as_dp_and_cp_do(tmp_path: Path) -> None:
    pool.write(tmp_path, 16)
    recipe = Recipe(**pool.ALIKE | {"documents": False}, pool=2)
    on_ring(
        4,
        [
            partial(pool.a_step_in_double_is_alike, tmp_path),
            partial(pool.goes_on_on_other_ranks, tmp_path),
            pool.each_sequence_is_dealt,
            pool.rows_are_read_ahead,
            partial(training_checks.answers_are_whole, pool.TOGETHER, recipe),
        ],
    )


def test_documents_run_over_the_edges_of_sequences(tmp_path: Path) -> None:
    pool.write(tmp_path, 16)
    on_ring(2, [partial(pool.documents_run_over_the_edges_of_sequences, tmp_path)])


@pytest.mark.exhaustive
def test_losses_stay_those_of_dp_and_cp_for_100_steps(tmp_path: Path) -> None:
    (corpus := tmp_path / "corpus").mkdir()
    pool.write(corpus, 400)
    on_ring(4, [partial(pool.losses_are_alike, corpus, 100, tmp_path)])
    for pooled in (2, 4):
        print(f"pool of {pooled}: {(tmp_path / f'{pooled}.txt').read_text()}")


@pytest.mark.parametrize(
    ("degrees", "changes", "says"),
    [
        (Degrees(), {"pool": 3}, "pool: got 3, expected a divisor of the sequences of a replica"),
        (Degrees(dp=2), {"pool": 4}, "pool: got 4, .* of a replica = 2"),
        (Degrees(), {"micro_batch": 2, "pool": 2, "documents": False}, "micro_batch: got 2, exp"),
        (Degrees(pp=2), {"pool": 2}, "pp: got 2 stages, expected 1 with a pool or partition"),
        (Degrees(pp=2), {"partition": "balanced"}, "pp: got 2 stages, expected 1 with a pool"),
        (Degrees(cp=2, tp=2), {"pool": 2, "seq_len": 125}, "seq_len: got 125, whose 125 rows"),
        (Degrees(), {"pool": 2, "scores": "whole", "documents": False}, "need cp 1, no pool"),
    ],
)
def test_pools_that_do_not_fit_are_known_before_there_are_ranks(
    degrees: Degrees, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        check(training_checks.TINY, degrees, Recipe(**pool.ALIKE | changes))


def test_a_pool_is_balanced_and_direct_unless_asked_otherwise() -> None:
    alone, pooled = Recipe(**pool.ALIKE), Recipe(**pool.ALIKE, pool=2)
    assert (alone.partition, alone.transport) == ("zigzag", "ring")
    assert (pooled.partition, pooled.transport) == ("balanced", "direct")
    asked = Recipe(**pool.ALIKE, pool=2, partition="striped", transport="ring")
    assert (asked.partition, asked.transport) == ("striped", "ring")
    assert replace(pooled, seq_len=64).partition == "balanced"
