"""What Triton needs on a machine with a GPU."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from ringray.base import toolchain


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a compiler and Python's headers."""
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    (tmp_path / "Python.h").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    return tmp_path


def test_a_machine_with_both_lacks_nothing(machine: Path) -> None:
    assert toolchain.missing() is None


def test_what_is_missing_is_named_with_its_package(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-cc -O2")
    assert str(toolchain.missing()).startswith("no C compiler (no-such-cc, as CC says); ")
    monkeypatch.setenv("CC", "gcc -O2")
    (machine / "Python.h").unlink()
    said = str(toolchain.missing())
    assert str(machine / "Python.h") in said
    assert "apt install python3-dev" in said
    monkeypatch.delenv("CC")
    (machine / "gcc").unlink()
    assert str(toolchain.missing()).startswith("no C compiler (gcc or clang); ")
