"""Files for output: never a link, an input or ringray's own; and paths in the folder of a job."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ringray.lab import cli
from ringray.lab.cli.options import Option, Output
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
    text = capsys.readouterr().err
    assert text.count("\n") == 1, text
    return text


@pytest.mark.parametrize(
    "name",
    [
        "s.db", "s.db-wal", ".s.db.0123456789ab.driver.lock", "link.jsonl", "hard.jsonl",
        "to/s.db.snapshot", "home/mlflow.db", "home/store.db", "home/tuned/local.json",
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
    text = _refused(capsys, "run", "small.yaml", "--store", "s.db", "--json", name)
    assert f"--json {name}: " in text
    assert "name another file" in text
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
    text = _refused(capsys, "submit", "small.yaml", "--address", "http://127.0.0.1:1", *options)
    assert f"{relative}: got " in text
    assert "expected an absolute path" in text


# The arguments with which each command that writes files is tried.
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
INPUTS = ("small.yaml", "s.db", "hw.yaml", "a.jsonl")
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
def inputs(home: Path) -> dict[str, bytes]:
    """Writes inputs of all kinds; returns what must stay."""
    fill("s.db", SMALL)
    text = "training: {corpus: corpus.bin, tokenizer: 'my words'}  # --json mine.jsonl\n"
    Path("small.yaml").write_text(SMALL + text)
    for name in ("hw.yaml", "a.jsonl", "corpus.bin", "my words", "far", "mine.jsonl"):
        Path(name).write_text(f"of {name}\n")
    Path("link").symlink_to("far")
    return _state()


def _state() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


def test_every_option_with_a_file_says_whether_it_writes() -> None:
    assert {name for name, _ in OUTPUTS} == set(LINES)
    assert all(isinstance(option, Output) for _, option in OUTPUTS)


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
def test_no_output_follows_a_link_or_replaces_an_input(
    inputs: dict[str, bytes], capsys: pytest.CaptureFixture[str], command: str, option: Output
) -> None:
    line = LINES[command]
    used = [name for name in INPUTS if name in {word.partition(":")[0] for word in line}]
    if "small.yaml" in used:  # it names these
        used += ["corpus.bin", "my words"]
    force = ["--force"] * any(other.names == ("--force",) for other in _options(command))
    for name in ["link", *used, *([] if option.folder else ["home"])]:
        text = _refused(capsys, command, *line, option.names[0], name, *force)
        assert f"{option.names[0]} {name}: " in text
    assert _state() == inputs


def test_links_to_nothing_sockets_and_hard_links_are_refused(
    inputs: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("dangling").symlink_to("nowhere")
    os.link("corpus.bin", "hard")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        for name in ("dangling", "hard", "socket"):
            _refused(capsys, "run", "small.yaml", "--store", "s.db", "--json", name)
    assert not Path("nowhere").exists()


def test_a_file_that_only_a_comment_names_is_no_input(inputs: dict[str, bytes]) -> None:
    Path("small.yaml").write_text(SMALL + "# --json mine.jsonl\n")
    assert cli.main(["plan", "small.yaml", "--json", "mine.jsonl"]) == 0


def test_files_in_a_folder_for_output_are_no_links(
    inputs: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").mkdir()
    Path("out/quickstart.yaml").symlink_to(Path("far").resolve())
    _refused(capsys, "examples", "quickstart", "-o", "out", "--force")
    assert Path("far").read_bytes() == inputs["far"]


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
