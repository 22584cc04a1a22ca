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
    import subprocess, sys, time
    from ringray.base import locks
    with locks.temporary_folder(sys.argv[1]) as folder:
        (folder.path / "file").write_text("x")
        other = subprocess.Popen([sys.executable, "-c", sys.argv[2], f"--of={folder.path}/x"],
                                 stdout=subprocess.DEVNULL)
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
def made(home: Path) -> Iterator[tuple[Path, psutil.Process]]:
    """The folder and the child of a process that was killed."""
    arguments = [sys.executable, "-c", MAKE, locks.RAY, SLEEP]
    maker = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
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


def test_what_a_killed_process_left_is_removed(
    home: Path, made: tuple[Path, psutil.Process]
) -> None:
    folder, child = made
    locks.remove_folders()
    assert _ended(child)
    assert not folder.exists()
    assert not list((home / "running").iterdir())


@pytest.mark.parametrize(
    "change",
    [{"host": "another"}, {"folder": "/"}, {"folder": "a/{name}"}, {"folder": 3}, "[" * 100_000],
    ids=lambda change: str(change)[:30],
)
def test_a_note_of_anything_else_ends_nothing(
    home: Path, made: tuple[Path, psutil.Process], change: dict[str, object] | str
) -> None:
    """Another machine, a folder of another name, nonsense."""
    folder, child = made
    (note,) = (home / "running").iterdir()
    if isinstance(change, str):
        note.write_text(change)
    else:
        fields = {name: str(value).format(name=folder.name) for name, value in change.items()}
        note.write_text(json.dumps(json.loads(note.read_text()) | fields))
    locks.remove_folders()
    assert not _ended(child)
    assert (folder / "file").exists()


def test_a_link_is_not_followed(home: Path, made: tuple[Path, psutil.Process]) -> None:
    folder, _ = made
    target = folder.rename(folder.with_name("target"))
    folder.symlink_to(target)
    locks.remove_folders()
    assert (target / "file").exists()


def test_a_folder_goes_with_its_block(home: Path) -> None:
    with locks.temporary_folder("ringray") as made:
        assert made.path.stat().st_mode & 0o777 == 0o700
        other = subprocess.Popen([sys.executable, "-c", SLEEP, f"--of={made.path}/x"])
    assert not made.path.exists()
    assert other.wait() == -signal.SIGKILL
    assert not list((home / "running").iterdir())
