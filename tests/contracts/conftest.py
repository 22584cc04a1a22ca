"""Fixtures of all contracts: the backends, one thread as sizes are tiny, a quicker interpreter."""

from __future__ import annotations

import pytest
import torch

from ringray_kernels.api import load_backend
from ringray_kernels.backends import BACKENDS
from tests.support import interpreter


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
    interpreter.hasten()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that computes on this machine."""
    reason = load_backend(request.param).unsupported(torch.zeros(1, 1, 1, 16))
    if reason:
        pytest.skip(reason)
    return str(request.param)
