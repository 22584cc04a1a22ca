"""Training on meshes of real ranks: the losses of one process, checkpoints of any mesh."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringray.training.checkpoint import CheckpointError
from ringray.training.recipe import Degrees, Recipe, check
from ringray.training.trainer import TrainingStep, check_facts
from tests.support import training_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring

ALONE: dict[Recipe, list[TrainingStep]] = {}


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """Steps of one process, which are computed once for each recipe."""

    def steps(recipe: Recipe, count: int) -> list[TrainingStep]:
        if recipe not in ALONE:
            place = tmp_path / "steps.json"
            on_ring(1, [partial(_record, place, recipe, count)])
            ALONE[recipe] = [TrainingStep(**one) for one in json.loads(place.read_text())]
        return ALONE[recipe][:count]

    return steps


def _record(place: Path, recipe: Recipe, count: int, rank: int, size: int) -> None:
    found = checks.steps(checks.trainer(Degrees(), recipe), count)
    place.write_text(json.dumps([vars(step) for step in found]))


MESHES = [
    Degrees(dp=2, cp=2), Degrees(cp=2, tp=2), Degrees(pp=2, cp=2), Degrees(cp=2), Degrees(cp=4),
]  # fmt: skip


@pytest.mark.parametrize("degrees", [MESHES[0], *exhaustive(MESHES[1]), MESHES[2]], ids=str)
def test_every_mesh_has_the_losses_of_one_process(degrees: Degrees, alone: Any) -> None:
    wanted = alone(checks.RECIPE, 8)[:3]
    assert wanted[-1].loss < wanted[0].loss
    on_ring(degrees.ranks, [partial(checks.losses_are, wanted, degrees, checks.RECIPE)])


def test_the_first_step_holds_what_every_step_does() -> None:
    on_ring(2, [checks.the_first_step_holds_all])


@pytest.mark.exhaustive
@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_losses_stay_those_of_one_process_for_100_steps(degrees: Degrees, alone: Any) -> None:
    """TP of processes that share cores is slow: fewer steps of it."""
    recipe = replace(checks.RECIPE, seq_len=254, steps=100)
    wanted = alone(recipe, 100)[: 15 if degrees.tp > 1 else 100]
    on_ring(degrees.ranks, [partial(checks.losses_are, wanted, degrees, recipe)])


@pytest.mark.parametrize(
    "changed",
    [
        {"transport": "ulysses", "kept": "attention"}, {"partition": "striped", "kept": "all"},
        *exhaustive({"kept": "attention"}, {"kept": "all"}, {"documents": False}),
    ],
    ids=str,
)  # fmt: skip
def test_every_strategy_trains_the_same(changed: Any, alone: Any) -> None:
    recipe = replace(checks.RECIPE, **changed)
    # One process without a ring has no strategy: what it trains on decides alone.
    wanted = alone(replace(checks.RECIPE, documents=recipe.documents), 8)[:3]
    on_ring(2, [partial(checks.losses_are, wanted, Degrees(cp=2), recipe)])


def test_vanilla_attention_and_mlp_train_the_same(alone: Any) -> None:
    recipe = replace(checks.RECIPE, documents=False)
    vanilla = replace(recipe, scores="whole", mlp_rows=None, loss_rows=None, kept="all")
    on_ring(2, [partial(checks.losses_are, alone(recipe, 3), Degrees(dp=2), vanilla)])


@pytest.mark.parametrize("degrees", [Degrees(dp=2, cp=2), Degrees(cp=2, tp=2)], ids=str)
def test_a_mesh_computes_what_one_process_does(degrees: Degrees, alone: Any) -> None:
    """Gradients, answers and FLOPs; and sequences at once train as one by one."""
    options: list[dict[str, Any]] = [
        {"mlp_rows": 7, "loss_rows": 7, "kept": "input"},
        {"mlp_rows": 7, "loss_rows": None, "kept": "attention"},
    ]  # fmt: skip
    each = [partial(checks.gradients_are, degrees, option) for option in options]
    recipe = replace(checks.RECIPE, documents=False)
    each.append(partial(checks.answers_are_whole, degrees, recipe))
    each.append(partial(checks.flops_are_of_visible_pairs, degrees))
    if degrees.tp == 1:
        at_once = replace(recipe, micro_batch=2)
        each.append(partial(checks.losses_are, alone(recipe, 3), degrees, at_once))
    on_ring(degrees.ranks, each)


@pytest.mark.parametrize(
    "degrees",
    [
        (Degrees(cp=2), Degrees(cp=4)), (Degrees(pp=2), Degrees()),
        *exhaustive((Degrees(cp=2), Degrees(tp=2)), (Degrees(pp=2), Degrees(pp=2))),
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_goes_on_with_another_mesh(
    degrees: tuple[Degrees, Degrees], tmp_path: Path, alone: Any
) -> None:
    before, after = degrees
    on_ring(before.ranks, [partial(checks.saves, tmp_path, 4, before)])
    wanted = alone(checks.RECIPE, 8)
    on_ring(after.ranks, [partial(checks.continues, tmp_path, wanted, after)])
    known = checks.facts(tmp_path)
    check_facts(known, checks.TINY)
    with pytest.raises(CheckpointError, match="another model: layers 2, expected layers 3"):
        check_facts(known, replace(checks.TINY, layers=3))


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_loss_is_per_token_of_the_step(replicas: int, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4)
    for number in range(120):
        (tmp_path / f"{number}.txt").write_text(chr(97 + number % 26))
    on_ring(replicas, [partial(checks.the_loss_is_per_token, tmp_path)])


def test_two_ranks_and_what_may_go_wrong(tmp_path: Path) -> None:
    on_ring(
        2,
        [
            checks.a_bad_loss_changes_nothing, checks.goes_on_behind_its_tokens,
            partial(checks.a_full_disk_is_told, tmp_path / "full"),
        ],
    )  # fmt: skip


def test_tokens_beyond_the_vocabulary_are_told(tmp_path: Path) -> None:
    tokens = np.zeros(66_001, np.uint16)
    tokens[65_990] = 256
    np.save(tmp_path / "t.npy", tokens)
    on_ring(1, [partial(checks.tokens_beyond_the_vocabulary_are_told, tmp_path)])


def test_models_that_attend_locally_are_refused_on_every_rank() -> None:
    on_ring(
        2,
        [
            checks.local_attention_is_refused, checks.models_of_transformers_attend_by_the_ring,
            checks.wrong_meshes_are_told,
        ],
    )  # fmt: skip
    on_ring(4, [checks.other_groups_are_refused])


@pytest.mark.parametrize(
    ("degrees", "changes", "says"),
    [
        (Degrees(dp=3), {}, "dp: got 3, expected a divisor of sequences = 4"),
        (Degrees(pp=3), {}, "pp: got 3, expected at most layers = 2"),
        (Degrees(dp=4, pp=2), {}, "pp: got 2 stages, expected at most"),
        (Degrees(tp=3), {}, "tp: got 3, expected a divisor of heads = 4"),
        (Degrees(tp=2), {"seq_len": 127, "partition": "contiguous"}, "seq_len: got 127"),
        (Degrees(cp=2), {"scores": "whole", "documents": False}, "whole scores need cp 1"),
        (Degrees(), {"scores": "whole", "documents": False, "kept": "attention"}, "kept: got"),
    ],
)
def test_what_does_not_fit_is_known_before_there_are_ranks(
    degrees: Degrees, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        check(checks.TINY, degrees, replace(checks.RECIPE, **changes))
