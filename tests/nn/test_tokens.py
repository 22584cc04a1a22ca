"""Log-probabilities, entropy and likeliest tokens: on real rings, and what one process can see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ringray.nn import token_entropy, token_log_probs, token_top_k
from tests.support import token_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring

EVERY = (checks.rows_are_exact, checks.vocabulary_is_sharded, checks.rows_are_compiled)


@pytest.mark.parametrize("size", [3, *exhaustive(1, 2)])
def test_rings(size: int) -> None:
    on_ring(size, EVERY)


def test_a_ring_of_four() -> None:
    on_ring(4, (checks.rows_are_exact, checks.vocabulary_is_sharded, checks.mistakes_are_told))


# In one process, without a group


def test_it_is_minus_the_loss() -> None:
    logits = torch.tensor([[0.0, 50.0, 100.0], [0.0, 0.0, 0.0]])
    probs = token_log_probs(logits, torch.tensor([2, 1], dtype=torch.int16))
    assert probs[0] == 0
    torch.testing.assert_close(probs[1], torch.tensor(1 / 3).log())
    small = token_log_probs(torch.tensor([[100.0, 90.0]]), torch.tensor([0]))
    assert small.item() == pytest.approx(-4.54e-5, rel=1e-2)  # in fp32 100 - 100.00005 is 0
    entropy = token_entropy(torch.tensor([[0.0, 0.0, -torch.inf]]))
    torch.testing.assert_close(entropy, torch.tensor([2.0]).log())


def test_only_some_rows_of_logits_exist() -> None:
    """In the forward pass and in its repetition."""
    sizes: list[int] = []
    head = nn.Linear(4, 9)
    head.register_forward_hook(lambda *call: sizes.append(call[2].shape[1]))
    x = torch.randn(1, 25, 4, requires_grad=True)
    labels = torch.randint(0, 9, (1, 25))
    token_log_probs(x, labels, head=head, rows=10).sum().backward()
    assert sorted(sizes) == [5, 5, 10, 10, 10, 10]
    with torch.no_grad():
        sizes.clear()
        token_entropy(x, head=head, rows=10)
    assert sizes == [10, 10, 5]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"labels": torch.tensor([[0, 5]])}, "labels: got 5, expected 0 to 4, the tokens of the"),
        ({"labels": torch.tensor([[0, -1]])}, "labels: got -1, expected 0 to 4"),
        ({"labels": torch.zeros(1, 2)}, "labels: got torch.float32 of shape .1, 2., expected int"),
        ({"labels": torch.zeros(2, 1).long()}, "labels: got torch.int64 of shape .2, 1."),
        ({"labels": None}, "labels: got NoneType, expected a tensor"),
        ({"x": torch.zeros(1, 2, 5).long()}, "logits: got torch.int64 of shape"),
        ({"temperature": 0.0}, "temperature: got 0.0, expected a positive number"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"rows": 2.5}, "rows: got 2.5, expected None or an integer of at least 1"),
        ({"ignore_index": 0.5}, "ignore_index: got 0.5"),
        ({"vocab_group": 3}, "group: got int, expected a process group, a DeviceMesh"),
    ],
)
def test_wrong_arguments_are_told(options: dict[str, Any], says: str) -> None:
    usual = {"x": torch.zeros(1, 2, 5), "labels": torch.tensor([[0, 1]])}
    with pytest.raises(ValueError, match=says):
        token_log_probs(**{**usual, **options})


def test_too_many_tokens_are_told() -> None:
    with pytest.raises(ValueError, match="k: got 6, expected at most 5"):
        token_top_k(torch.zeros(1, 2, 5), 6)
    with pytest.raises(ValueError, match="k: got True, expected an integer of at least 1"):
        token_top_k(torch.zeros(1, 2, 5), True)
