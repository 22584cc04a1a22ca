"""Surroundings that few users have: encodings, full disks, homes and paths that do not work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringray.lab.store.store import Store
from tests.support.tracking_store import begin, trials

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a store that has one sweep."""
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path))
    with Store(tmp_path / "store.db") as store:
        begin(store, trials(2))
    return tmp_path


def shell(line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``ringray LINE`` in a shell, which reads redirections."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    return subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m ringray {line}"],
        capture_output=True, text=True, errors="surrogateescape",
        env={**os.environ, "PYTHONPATH": paths, **variables}, check=False,
    )  # fmt: skip


def check_one_line(code: int, error: str, says: str) -> None:
    assert code == 2, error
    assert error.startswith("ringray: error: ")
    assert error.count("\n") == 1, error
    assert says in error


def test_a_terminal_without_our_characters(home: Path) -> None:
    done = shell("status quick", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert done.stderr == ""
    done = shell("status pröbe", PYTHONIOENCODING="ascii")
    check_one_line(done.returncode, done.stderr, "quick")


def test_a_full_stdout(home: Path) -> None:
    done = shell("list >/dev/full")
    says = "stdout, or a file cannot be used: no space left on device"
    check_one_line(done.returncode, done.stderr, says)
