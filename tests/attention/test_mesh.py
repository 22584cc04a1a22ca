"""``group=`` takes a ``DeviceMesh`` of one dimension wherever it takes a process group."""

from __future__ import annotations

import pytest
import torch

import ringray
from tests.support import mesh_checks as checks
from tests.support.ranks import on_ring


def test_a_ring_of_two() -> None:
    on_ring(
        2,
        (
            checks.is_its_group,
            checks.of_a_model,
            checks.is_compiled,
            checks.of_pytorchs_context_parallel,
            checks.has_one_dimension,
        ),
    )


@pytest.mark.parametrize("name", ["mesh", "device_mesh"])
def test_keywords_of_others_are_named(name: str) -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=f"'{name}'; ringray calls it group$"):
        ringray.ring_attention(q, q, q, **{name: None})
