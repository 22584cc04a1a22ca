"""Folders and processes that end with the process that made them, or with the next command.

A note in ``$RINGRAY_HOME/running`` names them. Its maker holds a file lock (``flock``) on the note,
which the kernel frees when the maker ends, however it ends: a note that is not locked was left by a
killed process, and :func:`remove` ends its processes and removes its folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ringray.base import private_files

if TYPE_CHECKING:
    import psutil

GRACE_S = 5.0  # seconds for processes to end after they were killed
_BIRTH_S = 2.0  # seconds by which the birth of one process may seem to differ: clocks are adjusted
RAY = "rr"  # the kind of the folder of an embedded Ray; short, because sockets lie in it
_NAME = re.compile(rf"({RAY}|ringray|\.recovering|\.mlflow)-[0-9a-f]{{8}}")


class Folder:
    """A temporary folder and the processes that work in it."""

    def __init__(self, path: Path, note: Path) -> None:
        self.path, self._note, self._births = path, note, dict[str, float]()

    @classmethod
    def of(cls, note: Path, text: str) -> Folder | None:
        """Returns what a note names; None if it is of another machine. Raises ValueError."""
        fields = json.loads(text)
        try:
            made = cls(Path(fields["folder"]), note)
            made._births = {str(pid): float(when) for pid, when in fields["births"].items()}
            ours = _NAME.fullmatch(made.path.name) and made.path.name == note.stem
            if not ours or not made.path.is_absolute():
                raise ValueError(made.path.name)
            return made if fields["host"] == socket.gethostname() else None
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError("not a note") from error

    def add(self, processes: Iterable[psutil.Process]) -> None:
        """Notes processes, which end with the folder, and all their descendants."""
        import psutil

        for process in _families(processes):
            with suppress(psutil.Error):
                self._births[str(process.pid)] = process.create_time()
        with suppress(OSError):  # of a full disk; the block itself still ends them
            self.describe()

    def describe(self) -> None:
        """Writes the note."""
        fields = {"host": socket.gethostname(), "folder": str(self.path), "births": self._births}
        with self._note.open("r+", encoding="utf-8") as file:  # in place: it is locked
            file.write(json.dumps(fields))

    def processes(self) -> list[psutil.Process]:
        """Returns those of the noted processes that still run. Of a Ray that was only starting,
        returns the processes that got the folder as an option."""
        import psutil

        running = []
        for pid, birth in self._births.items():
            with suppress(psutil.Error):
                process = psutil.Process(int(pid))
                if abs(process.create_time() - birth) < _BIRTH_S:
                    running.append(process)
        if not self._births and self.path.name.startswith(f"{RAY}-"):
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if f"={self.path}/" in " ".join(process.cmdline()):
                        running.append(process)
        return running

    def clear(self) -> None:
        """Ends the processes, and removes the folder, then the note; a folder that something still
        writes to stays for the next command, with the note."""
        import psutil

        processes = _families(self.processes())
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        until = time.monotonic() + GRACE_S
        while any(map(lives, processes)) and time.monotonic() < until:
            time.sleep(0.01)
        with suppress(OSError):
            if self.path.lstat().st_uid == os.geteuid():
                shutil.rmtree(self.path)
        with suppress(OSError):
            if not os.path.lexists(self.path):
                self._note.unlink(missing_ok=True)


@contextmanager
def folder(kind: str, parent: Path | None = None) -> Iterator[Folder]:
    """Yields a private folder; removes it and ends its processes when the block ends.

    Args:
        kind: the beginning of its name.
        parent: the folder to make it in, by default that of temporary files.

    Raises:
        OSError: it, or its note, cannot be written.
    """
    remove()
    name = f"{kind}-{secrets.token_hex(4)}"
    note = private_files.folder(private_files.create_home() / "running") / f"{name}.json"
    made = Folder(Path(parent or tempfile.gettempdir(), name).absolute(), note)
    private_files.create(note)
    with note.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            made.describe()
            made.path.mkdir(mode=private_files.FOLDER)
            yield made
        finally:
            made.clear()


def remove() -> None:
    """Removes what killed processes of this user on this machine left; never raises."""
    for note in (private_files.home() / "running").glob("*.json"):
        with suppress(OSError, ValueError), private_files.regular(note) as file:
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if made := Folder.of(note, file.read().decode()):
                    made.clear()


def _families(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Returns processes with all their descendants."""
    import psutil

    families = []
    for process in processes:
        with suppress(psutil.Error):
            families += [process, *process.children(recursive=True)]
    return families


def lives(process: psutil.Process) -> bool:
    """Returns whether a process runs; a killed one is a zombie until its parent collects it."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
