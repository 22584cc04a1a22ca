"""Steps and their arguments where a target has no function of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringray.verification import TargetError, defaults

IDS = torch.zeros(2, 3, dtype=torch.int64, device="cpu")
LOGITS = torch.ones(2, 3, 5, dtype=torch.float32, device="cpu")
LOSS = torch.ones((), dtype=torch.float32, device="cpu")
BATCH = {"input_ids": IDS, "labels": IDS, "shift_labels": IDS}


class Returns(nn.Module):
    """A model that returns something."""

    def __init__(self, out: Any) -> None:
        super().__init__()
        self.out = out

    def forward(self, ids: Tensor) -> Any:
        return self.out


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms the group of a process that runs alone."""
    monkeypatch.setattr(defaults.dist, "get_world_size", lambda *group: 1)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "out",
    [
        (LOGITS, LOSS),
        (LOSS, LOGITS),
        [None, LOSS, "x", LOGITS],
        {"lm_loss": LOSS, "scores": LOGITS},
        {"aux_loss": 3 * LOSS, "loss": LOSS, "logits": LOGITS},
        SimpleNamespace(loss=LOSS, logits=LOGITS, z_loss=3 * LOSS),
    ],
)
def test_the_loss_of_a_model_is_its_own_wherever_it_stands(out: Any) -> None:
    result = defaults.step(Returns(out), BATCH)
    assert result["loss"] is LOSS
    assert result["logits"] is LOGITS
    assert not result["note"]


@pytest.mark.usefixtures("one_rank")
def test_a_loss_without_logits_is_compared_alone() -> None:
    for out in (LOSS, (LOSS,), (torch.ones(2, 7, 5, dtype=torch.float32, device="cpu"), LOSS)):
        assert defaults.step(Returns(out), BATCH)["loss"] is LOSS
        assert defaults.step(Returns(out), BATCH)["logits"] is None


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("out", "message"),
    [
        (("nothing", 3), "the model returns str, int, expected logits"),
        (None, "the model returns NoneType, expected logits"),
        (LOGITS.flatten(0, 1), r"the model returns \(6, 5\), expected logits .* \(2, 3\)"),
        ((LOGITS, LOSS, LOSS), r"2 numbers: say in step\(\) what they are"),
    ],
)
def test_what_may_be_neither_logits_nor_loss_is_refused(out: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        defaults.step(Returns(out), BATCH)


@pytest.mark.parametrize(("kind", "share"), [("mean", 1.0), ("sum", 0.25)])
def test_a_loss_in_place_of_the_models_is_of_its_kind(
    kind: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "sharded_cross_entropy", lambda *args, **options: LOSS)
    monkeypatch.setattr(defaults.dist, "get_world_size", lambda *group: 4)
    monkeypatch.setattr(defaults, "loss_is", kind)
    result = defaults.step(Returns(LOGITS), BATCH)
    assert result["loss"] == share
    assert "the model returns no loss" in result["note"]


def test_arguments_are_passed_by_what_models_call_them() -> None:
    class Model(nn.Module):
        def forward(
            self, first: Tensor, pos: Tensor, targets: Tensor, labels: Any = None
        ) -> None: ...

    batch = BATCH | {"position_ids": IDS + 1, "shift_labels": IDS + 2}
    taken = defaults.arguments(Model(), batch)
    assert taken == {"first": IDS, "pos": batch["position_ids"], "targets": batch["shift_labels"]}


def test_an_argument_that_no_batch_has_is_named() -> None:
    class Model(nn.Module):
        def forward(self, ids: Tensor, labels: Tensor, *, alpha: float) -> None: ...

    with pytest.raises(TargetError, match=r"Model.forward\(\) needs labels, alpha, .*write step"):
        defaults.arguments(Model(), BATCH)
    assert defaults.arguments(Model(), BATCH, labels=IDS, alpha=1.0)["alpha"] == 1.0
