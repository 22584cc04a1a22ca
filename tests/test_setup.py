"""``make setup``: the lock, who installs it, and the environment of the oldest torch."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
BUILDS = {"torch", "triton"}  # differ by platform, so that they have no hashes


def pins(text: str) -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)[<=]=(\S+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def needed() -> set[str]:
    """Every package that ``ringray[dev]`` needs here, by what is installed."""
    waiting, names = [Requirement("ringray[dev]")], set()
    visited = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        names.add(name)
        for extra in {"", *requirement.extras}:
            if name in BUILDS or (name, extra) in visited:
                continue
            visited.add((name, extra))
            for line in metadata.requires(name) or ():
                inner = Requirement(line)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    waiting.append(inner)
    return names - {"ringray"}


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    """After a change of either: make lock."""
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert pinned.keys() >= BUILDS
    assert pins(LOCK) == {name: pinned[name] for name in pinned if name not in BUILDS}


def test_the_lock_has_all_that_is_needed_with_hashes() -> None:
    assert needed() - BUILDS <= pins(LOCK).keys()
    for block in re.split(r"\n(?=\S)", LOCK):
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block
    assert "://" not in LOCK  # no index of whoever wrote it


# Takes the place of Python, and then of what it installs; says what it is asked for.
SCRIPT = """#!/bin/sh
echo "$(basename "$0") $*" >> "{log}"
case "$*" in
  *"-c import sys"*) exit 0;;
  *"-c import pip"*) exit 1;;
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" .venv/bin/uv;;
  *"{fails}"*) exit 1;;
esac
"""


@pytest.mark.parametrize(
    ("settings", "fails", "installers"),
    [
        ([], "nothing", ["python uv.txt", "uv requirements.lock", "python constraints.txt"]),
        (["UV="], "nothing", ["python without-uv.txt", "python constraints.txt"]),
        (
            [],
            "requirements.lock",
            [
                "python uv.txt", "uv requirements.lock", "python without-uv.txt",
                "python constraints.txt",
            ],
        ),
        (
            ["TORCH_BY=uv", "TORCH=torch==2.11.*"],
            "nothing",
            ["python uv.txt", "uv requirements.lock", "uv constraints.txt"],
        ),
    ],
)  # fmt: skip
def test_pip_installs_where_uv_cannot(
    tmp_path: Path, settings: list[str], fails: str, installers: list[str]
) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(SCRIPT.format(log=log, fails=fails))
    python.chmod(0o755)
    command = ["make", f"PYTHON={python}", *settings, "setup"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    calls = [line for line in log.read_text().splitlines() if " install " in line]
    assert [f"{line.split()[0]} {Path(line.split()[-1]).name}" for line in calls] == installers, (
        calls
    )
    assert all("--require-hashes" in line for line in calls[:-1])
    without = (tmp_path / ".venv/without-uv.txt").read_text()
    assert pins(without) == {name: pin for name, pin in pins(LOCK).items() if name != "uv"}
    assert pins((tmp_path / ".venv/uv.txt").read_text()).keys() == {"uv"}
    chosen = (tmp_path / ".venv/constraints.txt").read_text()
    assert ("torch==2.11.*" in chosen.splitlines()) == (len(settings) == 2)
    assert len(re.findall(r"^torch", chosen, re.MULTILINE)) == 1


def test_a_failed_installation_does_not_count(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text(SCRIPT.format(log=tmp_path / "log", fails="constraints.txt"))
    python.chmod(0o755)
    command = ["make", f"PYTHON={python}", "setup"]
    assert subprocess.run(command, cwd=tmp_path, check=False, capture_output=True).returncode
    assert not (tmp_path / ".venv/.installed").exists()
