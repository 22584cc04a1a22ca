"""Fixtures of all contracts: the backends, one thread as sizes are tiny, a quicker interpreter."""

from __future__ import annotations

import pytest
import torch

from ringray_kernels.api import load_backend
from ringray_kernels.backends import BACKENDS
from tests.support.interpreter import one_thread

__all__ = ["backend", "one_thread"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that computes on this machine."""
    reason = load_backend(request.param).unsupported(torch.zeros(1, 1, 1, 16))
    if reason:
        pytest.skip(reason)
    return str(request.param)
