"""Cases that `make exhaustive` runs and CI does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from _pytest.mark.structures import ParameterSet


def exhaustive(*values: Any) -> list[ParameterSet]:
    """Returns the values of a parameter so that only `make exhaustive` takes them."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
