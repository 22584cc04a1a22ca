"""What all tests share: nothing a test does touches the home of the person who runs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Before anything imports triton: without a GPU its kernels run in the interpreter.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def ringray_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A private $RINGRAY_HOME for the session; no tracking server or cluster of the caller."""
    home = tmp_path_factory.mktemp("ringray-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGRAY_HOME", str(home))
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "RAY_ADDRESS"):
            patch.delenv(name, raising=False)
        yield home
    assert os.environ.get("RINGRAY_HOME") != str(home)


@pytest.fixture(autouse=True)
def interpreter_kept() -> Iterator[None]:
    """No test leaves Triton's interpreter switched for the processes of the next."""
    before = os.environ.get("TRITON_INTERPRET")
    yield
    after = os.environ.get("TRITON_INTERPRET")
    if before is None:
        os.environ.pop("TRITON_INTERPRET", None)
    else:
        os.environ["TRITON_INTERPRET"] = before
    assert after == before, f"TRITON_INTERPRET is {after!r} after the test, {before!r} before it"
