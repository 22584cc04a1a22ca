"""One thread: sizes are tiny, and a second one only waits when the machine is busy."""

from __future__ import annotations

import pytest
import torch

from tests.support import interpreter


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
    interpreter.hasten()
