"""Files for output that are ringray's own, and paths in the folder of a job."""

from __future__ import annotations

import os
import shutil
import socket
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringray.base.errors import UserError
from ringray.lab import cli
from ringray.lab.cli.options import Option, Output
from ringray.lab.cli.outputs import check_file
from ringray.lab.store.store import Store
from tests.support.small_spec import SMALL, fill


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


# The arguments with which each command that writes files is tried, all of them inputs.
LINES = {
    "plan": ["small.yaml", "--store", "s.db", "--on", "hw.yaml:1x8"],
    "run": ["small.yaml", "--store", "s.db"],
    "tune": ["small.yaml", "--store", "s.db"],
    "resume": ["small", "--store", "s.db"],
    "submit": ["small.yaml", "--address", "http://127.0.0.1:1"],
    "status": ["small", "--store", "s.db"],
    "report": ["small", "--store", "s.db"],
    "compare": ["a.jsonl", "s.db:small"],
    "advise": ["8b", "--on", "hw.yaml:1x8", "--context", "8k", "--store", "s.db"],
    "calibrate": [],
    "doctor": ["--cluster", "--address", "127.0.0.1:1"],
    "tuned": [],
    "examples": ["quickstart"],
}
INPUTS = ("small.yaml", "s.db", "hw.yaml", "a.jsonl", "corpus.bin")
READ = ("--store", "--import")  # options with the name of a file that is read


def _options(command: str) -> tuple[Option, ...]:
    return getattr(cli._command(command)[0], "options", ())


OUTPUTS = [
    (command, option)
    for command in cli.COMMANDS
    for option in _options(command)
    if option.settings.get("metavar") in ("F", "FILE", "DIR", "FOLDER")
    and option.names[-1] not in READ
]


@pytest.fixture
def inputs(home: Path) -> dict[str, tuple[int, int, bytes]]:
    """Writes inputs of all kinds; returns what must stay."""
    fill("s.db", SMALL)
    live = Store("s.db")  # so that it has a log
    live.finish(live.find("small").digest, "complete")
    for ending in ("", "-wal", "-shm"):
        shutil.copyfile(f"s.db{ending}", f"copy{ending}")
    live.close()
    for ending in ("", "-wal", "-shm"):
        Path(f"copy{ending}").replace(f"s.db{ending}")
    text = "training: {corpus: corpus.bin, tokenizer: 'my words'}  # --json mine.jsonl\n"
    Path("small.yaml").write_text(SMALL + text)
    for name in ("hw.yaml", "a.jsonl", "corpus.bin", "my words", "far", "mine.jsonl"):
        Path(name).write_text(f"of {name}\n")
    return _state()


def _state() -> dict[str, tuple[int, int, bytes]]:
    files = [one for one in Path().rglob("*") if one.is_file() and not one.is_symlink()]
    return {
        str(one): (one.stat().st_ino, one.stat().st_mtime_ns, one.read_bytes()) for one in files
    }


def test_every_option_with_a_file_says_whether_it_writes() -> None:
    assert {name for name, _ in OUTPUTS} == set(LINES)
    assert all(isinstance(option, Output) for _, option in OUTPUTS)


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
def test_no_output_follows_a_link_or_replaces_an_input(
    inputs: dict[str, tuple[int, int, bytes]], capsys: pytest.CaptureFixture[str],
    command: str, option: Output,
) -> None:  # fmt: skip
    line = LINES[command]
    Path("link").symlink_to("far")
    Path("dangling").symlink_to("nowhere")
    Path("folder-link").symlink_to("home")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    used = [one for word in line for one in INPUTS if word.partition(":")[0] == one]
    if "small.yaml" in used:
        used += ["corpus.bin", "my words"]
    bad = ["link", "dangling", "folder-link", "socket", *used, "home/store.db"]
    bad += [] if option.folder else ["home"]
    if "s.db" in used:
        bad += ["s.db-wal", "s.db-shm", "s.db-journal"]
    for name in used:
        os.link(name, f"hard-{name}")
        bad.append(f"hard-{name}")
    force = ["--force"] * any(one.names == ("--force",) for one in _options(command))
    before = _state()
    for name in bad:
        for more in ([], force):
            said = _refused(capsys, command, *line, option.names[0], name, *more)
            assert f"{option.names[0]} {name}: " in said
        assert _state() == before
    assert {name: before[name] for name in inputs} == inputs
    assert not Path("nowhere").exists()


def test_files_in_a_folder_for_output_are_no_links(
    inputs: dict[str, tuple[int, int, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").mkdir()
    assert cli.main(["report", "small", "--store", "s.db", "--png", "out"]) == 0
    drawn = sorted(Path("out").iterdir())
    for picture in drawn:
        picture.unlink()
    drawn[0].symlink_to(Path("far").resolve())
    Path("out/quickstart.yaml").symlink_to(Path("far").resolve())
    Path("small.html").unlink()
    capsys.readouterr()
    _refused(capsys, "report", "small", "--store", "s.db", "--png", "out", "--force")
    _refused(capsys, "examples", "quickstart", "-o", "out", "--force")
    assert {name: _state()[name] for name in inputs} == inputs
    drawn[0].unlink()
    drawn[0].write_bytes(b"\0old")
    _refused(capsys, "report", "small", "--store", "s.db", "--png", "out")
    assert cli.main(["report", "small", "--store", "s.db", "--png", "out", "--force"]) == 0
    assert drawn[0].read_bytes().startswith(b"\x89PNG")


def test_streams_and_devices_are_written_and_stay(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fill("s.db", SMALL)
    os.mkfifo("pipe")
    status = ["status", "small", "--store", "s.db", "--json"]
    lines = ["plan", "small.yaml", "--json"]
    with ThreadPoolExecutor() as pool, (tmp_path / "stream").open("w+b") as stream:
        for line in (status, lines):
            read = pool.submit(Path("pipe").read_text)
            assert cli.main([*line, "pipe"]) == 0
            assert read.result().startswith("{")
            assert cli.main([*line, f"/dev/fd/{stream.fileno()}"]) == 0
            assert cli.main([*line, "/dev/null"]) == 0
        stream.seek(0)
        assert stream.read().startswith(b"{")
    assert Path("pipe").is_fifo()


def test_a_file_that_only_a_comment_names_is_no_input(
    inputs: dict[str, tuple[int, int, bytes]],
) -> None:
    arguments = Namespace(spec="small.yaml")
    check_file("--json", "mine.jsonl", arguments)
    with pytest.raises(UserError, match="would replace"):
        check_file("--json", "my words", arguments)
