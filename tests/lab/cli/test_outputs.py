"""Files for output: never a link or an input; and paths in the folder of a job."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringray.lab import cli
from ringray.lab.cli.options import Output
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


def test_every_option_with_a_file_says_whether_it_writes() -> None:
    for command in cli.COMMANDS:
        for option in getattr(cli._command(command)[0], "options", ()):
            if option.settings.get("metavar") in ("F", "FILE", "DIR", "FOLDER"):
                read = option.names[-1] in ("--store", "--import")
                assert isinstance(option, Output) != read, (command, option.names)


def test_files_in_a_folder_for_output_are_no_links(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").mkdir()
    Path("far").write_text("mine")
    Path("out/quickstart.yaml").symlink_to(Path("far").resolve())
    _refused(capsys, "examples", "quickstart", "-o", "out", "--force")
    assert Path("far").read_text() == "mine"


def test_streams_and_devices_are_written_and_stay(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fill("s.db", SMALL)
    os.mkfifo("pipe")
    with ThreadPoolExecutor() as pool, (tmp_path / "stream").open("w+b") as stream:
        for line in (["status", "small", "--store", "s.db"], ["plan", "small.yaml"]):
            read = pool.submit(Path("pipe").read_text)
            assert cli.main([*line, "--json", "pipe"]) == 0
            assert read.result().startswith("{")
            assert cli.main([*line, "--json", f"/dev/fd/{stream.fileno()}"]) == 0
            assert cli.main([*line, "--json", "/dev/null"]) == 0
        stream.seek(0)
        assert stream.read().startswith(b"{")
    assert Path("pipe").is_fifo()
