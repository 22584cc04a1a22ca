"""Files for output that are ringray's own, and paths in the folder of a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringray.lab import cli
from ringray.lab.store.store import Store
from tests.support.small_spec import SMALL


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home" / "tuned").mkdir(parents=True)
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.setattr("ringray.lab.driver.run.run", lambda *_, **__: pytest.fail("it ran"))
    return tmp_path / "home"


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize(
    "name",
    [
        "s.db", "s.db-wal", "s.db-shm", "s.db.snapshot", ".s.db.0123456789ab.driver.lock",
        "link.jsonl", "hard.jsonl", "to/s.db-wal", "home/mlflow.db", "home/mlflow.db-wal",
        "home/store.db", "home/tuned/local.json", "home/running/rr-00000000.json",
    ],
)  # fmt: skip
def test_output_never_goes_into_files_of_ringray(
    home: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with Store(home.parent / "s.db"):
        pass
    Path("link.jsonl").symlink_to("s.db")
    os.link("s.db", "hard.jsonl")
    Path("to").symlink_to(".")
    before = Path("s.db").read_bytes()
    said = _refused(capsys, "run", "small.yaml", "--store", "s.db", "--json", name)
    assert f"--json {name}: " in said
    assert "name another file" in said
    assert Path("s.db").read_bytes() == before
    if name.startswith("home/"):
        _refused(capsys, "tuned", "--export", name)


def test_a_job_keeps_nothing_in_its_own_folder(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the store, not the lines, not MLflow's database."""
    folder = home.parent / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    (folder / "small.yaml").write_text(
        SMALL.replace("tracking: {enabled: false}", "tracking: {uri: 'sqlite:///m.db'}")
    )
    monkeypatch.chdir(folder)
    for options in (["--store", "s.db"], ["--json", "a.jsonl", "--no-tracking"], []):
        assert "of a Ray job" in _refused(capsys, "run", "small.yaml", *options)
    assert [one.name for one in folder.iterdir()] == ["small.yaml"]


@pytest.mark.parametrize("relative", ["--store", "tracking.uri"])
def test_submit_refuses_relative_paths(
    home: Path, capsys: pytest.CaptureFixture[str], relative: str
) -> None:
    """Before it looks for a cluster."""
    uri = "sqlite:///m.db" if relative == "tracking.uri" else "sqlite:////srv/m.db"
    Path("small.yaml").write_text(
        SMALL.replace("tracking: {enabled: false}", f"tracking: {{uri: '{uri}'}}")
    )
    options = ["--store", "s.db"] if relative == "--store" else []
    said = _refused(capsys, "submit", "small.yaml", "--address", "http://127.0.0.1:1", *options)
    assert f"{relative}: got " in said
    assert "expected an absolute path" in said
