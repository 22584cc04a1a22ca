"""Files for output: never a link or an input; and paths in the folder of a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringray.lab import cli
from tests.support.small_spec import SMALL, fill


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.setattr("ringray.lab.driver.run.run", lambda *_, **__: pytest.fail("it ran"))
    return tmp_path / "home"


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return text


@pytest.mark.parametrize("name", ["s.db", "link.jsonl", "hard.jsonl", "home/mlflow.db", "home"])
def test_no_output_follows_a_link_or_replaces_an_input(
    home: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    fill("s.db", SMALL)
    (home / "mlflow.db").touch()
    Path("link.jsonl").symlink_to("nowhere")
    os.link("s.db", "hard.jsonl")
    before = Path("s.db").read_bytes()
    for line in (["run", "small.yaml"], ["status", "small"], ["plan", "small.yaml"]):
        text = _refused(capsys, *line, "--store", "s.db", "--json", name)
        assert f"--json {name}: is a" in text
        assert not Path("nowhere").exists()
    assert Path("s.db").read_bytes() == before


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
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]
