"""Cases that `make exhaustive` runs and CI does not."""

from __future__ import annotations

from typing import Any

import pytest


def exhaustive(*values: Any) -> list[Any]:
    """Returns the values of a parameter so that only `make exhaustive` takes them."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]
