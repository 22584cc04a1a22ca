"""Folders and processes of a killed process, which the next command removes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ringray.base import locks

MAKE = """if True:
    import subprocess, sys, time, psutil
    from ringray.base import locks
    with locks.temporary_folder(sys.argv[1]) as folder:
        (folder.path / "file").write_text("x")
        other = subprocess.Popen([sys.executable, "-c", sys.argv[2], f"--of={folder.path}/x"],
                                 stdout=subprocess.DEVNULL)
        if sys.argv[3] == "noted":
            folder.add([psutil.Process(other.pid)])
        print(folder.path, other.pid, flush=True)
        time.sleep(3600)
"""
SLEEP = "import time; time.sleep(3600)"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "home"


@pytest.fixture
def made(home: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, psutil.Process]]:
    """The folder and the child of a process that was killed."""
    arguments = [MAKE, locks.RAY, SLEEP, getattr(request, "param", "noted")]
    maker = subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    folder, pid = maker.stdout.readline().split()
    child = psutil.Process(int(pid))
    try:
        locks.remove_folders()
        assert (Path(folder) / "file").exists()  # its maker lives
        assert child.is_running()
        maker.kill()
        maker.communicate()
        yield Path(folder), child
    finally:
        maker.kill()
        child.kill() if child.is_running() else None


def _ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("made", ["noted", "starting"], indirect=True)
def test_what_a_killed_process_left_is_removed(
    home: Path, made: tuple[Path, psutil.Process]
) -> None:
    """Also by a Ray that was only starting, whose processes nothing has noted yet."""
    folder, child = made
    locks.remove_folders()
    assert _ended(child)
    assert not folder.exists()
    assert not list((home / "running").iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"births": "later"},
        {"host": "another"},
        {"folder": "/"},
        {"folder": "a/{name}"},
        {"births": 3},
        {"births": {"-1": 0.0}},
        "[" * 100_000,
    ],
    ids=lambda change: str(change)[:30],
)
def test_a_note_of_anything_else_ends_nothing(
    home: Path, made: tuple[Path, psutil.Process], change: dict[str, object] | str
) -> None:
    """A pid that is used again, another machine, a folder of another name, nonsense."""
    folder, child = made
    (note,) = (home / "running").iterdir()
    said = json.loads(note.read_text())
    if isinstance(change, str):
        note.write_text(change)
        locks.remove_folders()
        assert not _ended(child)
        return
    if change == {"births": "later"}:
        change = {"births": {pid: when + 60 for pid, when in said["births"].items()}}
    elif "folder" in change:
        change = {"folder": str(change["folder"]).format(name=folder.name)}
    note.write_text(json.dumps(said | change))
    locks.remove_folders()
    assert not _ended(child)


def test_a_link_is_not_followed(home: Path, made: tuple[Path, psutil.Process]) -> None:
    folder, _ = made
    kept = folder.rename(folder.with_name("kept"))
    folder.symlink_to(kept)
    locks.remove_folders()
    assert (kept / "file").exists()


def test_a_folder_goes_with_its_block(home: Path) -> None:
    with locks.temporary_folder("ringray") as made:
        assert made.path.stat().st_mode & 0o777 == 0o700
        other = subprocess.Popen([sys.executable, "-c", SLEEP])
        made.add([psutil.Process(other.pid)])
    assert not made.path.exists()
    assert other.wait() == -signal.SIGKILL
    assert not list((home / "running").iterdir())
