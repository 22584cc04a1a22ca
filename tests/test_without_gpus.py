"""``pytest -m gpu``: fails where every test was skipped, and believes PyTorch about GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PRETENDED = """
import os, torch
torch.cuda.is_available = lambda: True
def pytest_collection_finish(session):
    print("interpreter:", os.environ.get("TRITON_INTERPRET"))
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Of few tests; ``pretended`` is a plugin by which there is a GPU."""
    (folder / "pretended.py").write_text(PRETENDED)
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *options,
         "tests/attention/test_synchronisation.py"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_run_that_skips_every_gpu_test_fails(tmp_path: Path) -> None:
    code, said = run(tmp_path)
    assert "0 gpu tests, expected 1 at least" in said
    assert code == pytest.ExitCode.TESTS_FAILED, said


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="shows its GPUs")
def test_kernels_are_compiled_where_pytorch_knows_a_gpu(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-p", "pretended", "--collect-only")
    assert code == 0, said
    assert "interpreter: None" in said
