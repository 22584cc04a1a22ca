"""``parallelize`` takes every right model, and refuses every wrong one on all ranks."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support import refusal_checks as checks
from tests.support.ranks import on_ring


@pytest.mark.parametrize("name", checks.RIGHT)
def test_right_models_pass(name: str) -> None:
    on_ring(2, [partial(checks.passes, name)])


@pytest.mark.parametrize("name", checks.WRONG)
def test_wrong_models_are_refused(name: str) -> None:
    on_ring(2, [partial(checks.is_refused, name)])


def test_a_ring_of_one_takes_attention_of_any_kind() -> None:
    on_ring(2, [checks.a_ring_of_one_takes_attention_of_any_kind])
