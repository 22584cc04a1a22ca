"""Every public function in every state of torch that a user may set: the same results."""

from __future__ import annotations

import pytest

import ringray
import ringray.nn
from tests.support import state_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring


@pytest.mark.parametrize("size", [*exhaustive(1), 2])
def test_states_of_torch_change_no_result(size: int) -> None:
    on_ring(size, (checks.functions_in_states, checks.caches_in_states, checks.checkpointed))


def test_every_public_function_is_listed() -> None:
    listed = {word for name in checks.FUNCTIONS for word in name.split()}
    public = {*ringray.__all__, *ringray.nn.__all__} - {*checks.STATELESS}
    assert public <= listed
