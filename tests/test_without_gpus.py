"""``pytest -m gpu``: fails where every test was skipped, believes PyTorch about GPUs, and needs no
other packages than a GPU image has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FEW = "tests/attention/test_synchronisation.py"
PRETENDED = """
import os, torch
torch.cuda.is_available = lambda: True
def pytest_collection_finish(session):
    print("interpreter:", os.environ.get("TRITON_INTERPRET"))
"""
LISTING = """
def pytest_collection_finish(session):
    for item in session.items:
        if item.get_closest_marker("gpu"):
            print("gpu:", item.nodeid)
"""
# What ringray's platform and its development need beside torch, triton, numpy and pytest.
LACKING = """
import sys
from importlib.machinery import PathFinder
PACKAGES = "ray mlflow psutil yaml rich scipy pydantic matplotlib transformers hypothesis".split()
class Lacking(PathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] not in PACKAGES:
            return PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Lacking if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Of few tests; ``pretended`` is a plugin by which there is a GPU, by ``lacking`` there are few
    packages."""
    (folder / "pretended.py").write_text(PRETENDED)
    (folder / "listing.py").write_text(LISTING)
    (folder / "lacking.py").write_text(LACKING)
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *options],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_run_that_skips_every_gpu_test_fails(tmp_path: Path) -> None:
    code, printed = run(tmp_path, FEW)
    assert "0 gpu tests, expected 1 at least" in printed
    assert code == pytest.ExitCode.TESTS_FAILED, printed


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="shows its GPUs")
def test_kernels_are_compiled_where_pytorch_knows_a_gpu(tmp_path: Path) -> None:
    code, printed = run(tmp_path, "-p", "pretended", "--collect-only", FEW)
    assert code == 0, printed
    assert "interpreter: None" in printed


@pytest.mark.slow
def test_all_gpu_tests_are_collected_on_an_image_for_gpus(tmp_path: Path) -> None:
    """By the marks that their files show, without an import of any other file."""
    options = ("-p", "listing", "--collect-only", "tests")
    code, few = run(tmp_path, "-p", "lacking", "-p", "no:hypothesispytest", *options)
    assert code == 0, few
    _, every = run(tmp_path, "-m", "", *options)
    listed, of_all = (
        [line for line in text.splitlines() if line.startswith("gpu:")] for text in (few, every)
    )
    assert len(listed) > 200
    assert listed == of_all
