"""MLflow's own database is whole in every home, whoever comes first and whoever is killed."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
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


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir() if one.name.startswith(path.name))


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
    assert names(tmp_path / "mlflow.db") == ["mlflow.db"]


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


def test_a_database_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    made = client_of(f"sqlite:///{path}").create_experiment("mine")
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE alembic_version SET version_num = 'a newer one'")
        db.commit()
    client_of(f"sqlite:///{path}")  # no error yet: MLflow's own says what to do
    with closing(sqlite3.connect(path)) as db:
        names_there = db.execute("SELECT name FROM experiments WHERE experiment_id = ?", (made,))
        assert names_there.fetchall() == [("mine",)]
    assert names(path) == ["mlflow.db"]


def test_a_folder_whose_name_has_signs_of_a_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "100%41 a?b#c"
    monkeypatch.setenv("RINGRAY_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = location.resolve_uri(None)
    assert location.sqlite_path(uri) == home / "mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{uri}?timeout=5")
    assert location.resolve_uri(None) == f"{uri}?timeout=5"
    location.check(uri)
    client = client_of(uri)
    root = location.artifact_root(uri)
    run = client.create_run(client.create_experiment("quick", artifact_location=root))
    client.log_text(run.info.run_id, "text", "file.txt")
    assert [path.name for path in (home / "artifacts").rglob("*.txt")] == ["file.txt"]
    # MLflow also makes an empty folder with the name as it stands in the URI.
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and home not in path.parents
    ] == []
