"""Accelerate's context parallelism on the ring, against the installed release."""

from __future__ import annotations

import pytest

from tests.support.ranks import on_ring

pytest.importorskip("accelerate")
from tests.support import accelerate_checks as checks


def test_a_ring_of_two() -> None:
    on_ring(2, (checks.trains_alike, checks.is_never_bypassed))


def test_one_process() -> None:
    on_ring(1, (checks.is_a_ring_of_one,))
