"""The norm of the gradients of a model on a mesh."""

from __future__ import annotations

from functools import partial

import pytest

from ringray.training.recipe import Degrees
from tests.support import gradient_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring


@pytest.mark.parametrize(
    "degrees", [Degrees(pp=2, cp=2), *exhaustive(Degrees(cp=2, tp=2), Degrees(dp=2, cp=2))], ids=str
)
def test_norms_are_whole(degrees: Degrees) -> None:
    on_ring(degrees.ranks, [partial(checks.norms_are_whole, degrees)])


def test_clipping() -> None:
    on_ring(3, (checks.fsdp_is_clipped, checks.mistakes_are_told))
    on_ring(1, (partial(checks.norms_are_whole, Degrees()),))
