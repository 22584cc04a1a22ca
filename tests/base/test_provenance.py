"""The environment of a measurement, and the identity of two points."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pynvml
import pytest

from ringray.base import provenance

CONFIG = {"seq_len": 64}


def test_it_describes_this_machine() -> None:
    found = provenance.describe()
    assert set(found) == {
        "hardware", "os", "python", "versions", "git", "code", "kernels",
    }  # fmt: skip
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 1 << 20
    assert isinstance(found["hardware"]["gpus"], list)
    assert set(found["versions"]) == {"torch", "triton", "ray", "mlflow", "ringray"}
    assert len(found["code"]) == len(found["kernels"]) == 64
    assert os.uname().nodename not in str(found)


def test_a_point_is_its_config_kernels_hardware_and_versions() -> None:
    base = {
        "hardware": {"cpu": "a", "cores": 2, "memory_bytes": 8 << 30, "gpus": []},
        "versions": {"torch": "2", "triton": "3", "ringray": "1", "ray": "2", "mlflow": "3"},
        "kernels": "k",
        "code": "c",
        "git": {"commit": "1", "dirty": False},
    }
    point = provenance.point_digest(CONFIG, base)
    assert len(point) == 64
    same = [
        base | {"code": "other", "git": None, "os": "other"},
        base | {"versions": base["versions"] | {"mlflow": "4", "ray": "3"}},
        base | {"hardware": base["hardware"] | {"memory_bytes": (8 << 30) + 4096}},
    ]
    assert {provenance.point_digest(CONFIG, other) for other in same} == {point}
    different = [
        base | {"kernels": "other"},
        base | {"versions": base["versions"] | {"torch": "3"}},
        base | {"hardware": base["hardware"] | {"gpus": ["H100"]}},
        base | {"hardware": base["hardware"] | {"memory_bytes": 16 << 30}},
    ]
    points = {provenance.point_digest(CONFIG, other) for other in different}
    points |= {point, provenance.point_digest({"seq_len": 65}, base)}
    assert len(points) == 6


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not shutil.which("git"):
        pytest.skip("needs git")
    package = tmp_path / "ringray"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(provenance, "_PACKAGE", package)
    return tmp_path


def _git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", *settings, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_git_names_the_commit_of_our_checkout(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert provenance.git_state() is None
    _git(checkout, "init", "-q")
    assert provenance.git_state() is None, "no commit yet"
    _git(checkout, "add", ".")
    _git(checkout, "commit", "-q", "-m", "one")
    commit = _git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert provenance.git_state() == {"commit": commit, "dirty": False}
    (checkout / "untracked").write_text("")
    assert provenance.git_state() == {"commit": commit, "dirty": False}
    (checkout / "ringray" / "__init__.py").write_text("x = 1")
    assert provenance.git_state() == {"commit": commit, "dirty": True}


@pytest.mark.parametrize("broken", [None, "nvmlInit", "nvmlDeviceGetName"])
def test_gpus_are_named_by_the_driver(broken: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken one means that there is none."""

    def fail(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda i: i)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: f"NVIDIA {handle}")
    if broken is not None:
        monkeypatch.setattr(pynvml, broken, fail)
    gpus = provenance.hardware.__wrapped__()["gpus"]
    assert gpus == ([] if broken else ["NVIDIA 0", "NVIDIA 1"])
