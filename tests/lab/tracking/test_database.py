"""MLflow's own database is whole in every home, whoever comes first and whoever is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringray.lab.tracking import location
from ringray.lab.tracking.database import client_of

OPEN = """
import sys
from ringray.lab.tracking.database import client_of
client = client_of(sys.argv[1])
client.create_run("0", tags={"who": sys.argv[2]})
"""


def opened(uri: str, who: str = "") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", OPEN, uri, who], stderr=subprocess.PIPE)


def new_sizes(path: Path) -> list[int]:
    return [one.stat().st_size for one in path.parent.glob(".mlflow*/new.db")]


@pytest.mark.slow
def test_processes_that_come_first_together_all_find_it_whole(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    location.check(uri)  # leaves an empty file, as in a driver
    first = [opened(uri, who) for who in "ab"]
    for one in first:
        _, errors = one.communicate()
        assert one.returncode == 0, errors.decode()
    found = client_of(uri).search_runs(["0"])
    assert sorted(run.data.tags["who"] for run in found) == ["a", "b"]


@pytest.mark.exhaustive
def test_a_process_killed_while_it_creates_it_leaves_nothing_broken(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    strike = "import os, pathlib; pathlib.Path.replace = lambda *_: os.kill(os.getpid(), 9)"
    uri = f"sqlite:///{path}"
    done = subprocess.run([sys.executable, "-c", f"{strike}\n{OPEN}", uri, ""], check=False)
    assert done.returncode == -signal.SIGKILL
    assert new_sizes(path)
    assert not path.exists() or path.stat().st_size == 0
    assert client_of(uri).search_experiments()
    assert not new_sizes(path)
