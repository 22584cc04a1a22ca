"""Locks that end with their process, and what a killed process leaves: leases and folders.

A lock (``flock``) is held on a small file that names its holder. The kernel frees it when the
holder ends, however it ends: a file that names a process and is not locked was left by a killed
one. There are two kinds:

- leases, beside a store: at most one driver and one tracker per sweep. If the file system keeps
  locks per machine, a driver on a second one can take the lease; both drivers then report it.
- notes of temporary folders, in ``$RINGRAY_HOME/running``: :func:`remove_folders` removes those of
  a killed process, and ends the processes that work in them.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ringray.base import private_files
from ringray.base.errors import PlaceError, reason_of

if TYPE_CHECKING:
    import psutil

_LEASE_BYTES = 1024  # bytes of a lease file, at most
_RETRY_S = 0.5  # seconds; `owner` may hold a free lock for a moment
GRACE_S = 5.0  # seconds for processes to end after they were killed
RAY = "rr"  # the kind of the folder of an embedded Ray; short, because sockets lie in it
_NAME = re.compile(rf"({RAY}|ringray|\.recovering|\.mlflow)-[0-9a-f]{{8}}")


# Leases


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds or held a lease; ``str()`` is for messages."""

    pid: int
    host: str
    since: str

    @property
    def is_local(self) -> bool:
        """True if it runs on this machine."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.is_local else f" on {self.host}")


@contextmanager
def hold(
    path: Path, refusal: Callable[..., str], note: Callable[[str], None] | None
) -> Iterator[Callable[[], bool]]:
    """Holds the lease at ``path`` and yields a function that tells whether it is still held.

    ``note`` is told of a holder on another machine that left the lease behind.

    Raises:
        PlaceError: another process holds it, with the message ``refusal(owner=...)``; or the file
            system has no locks or no space.
    """
    me = Owner(os.getpid(), socket.gethostname(), str(time.time()))
    try:
        if (file := _acquire(path)) is None:
            raise PlaceError(refusal(owner=_owner_in(path) or Owner(0, "?", "")))
        before = _owner_in(path)
        file.truncate()
        print(me.pid, me.host, me.since, file=file, flush=True)
    except OSError as error:
        raise PlaceError(
            f"the lock {path} cannot be taken: {reason_of(error)}; free some "
            "space, or use another store with --store FILE, on a file system with file locks"
        ) from error
    with file:
        if before is not None and not before.is_local and note is not None:
            note(f"{before} did not end this sweep; its lock is free, so this driver takes over")
        try:
            yield lambda: _owner_in(path) == me
        finally:
            with suppress(OSError):
                if _owner_in(path) == me:
                    path.unlink()


def live_owners(store: Path) -> list[Owner]:
    """Returns the live holders of all leases of a store."""
    store = store.resolve()
    paths = sorted(store.parent.glob(f".{glob.escape(store.name)}.*.lock"))
    return [holder for path in paths if (holder := owner(path))]


def lease_path(store: Path, digest: str, role: str) -> Path:
    """Returns the file of a sweep's lease for a ``role``, beside the store."""
    store = store.resolve()
    return store.with_name(f".{store.name}.{digest[:12]}.{role}.lock")


def _acquire(path: Path) -> IO[str] | None:
    """Creates the file if there is none, and locks it; None if another process holds it."""
    until = time.monotonic() + _RETRY_S
    while True:
        private_files.create(path)
        file = _locked(path)
        if file is not None or time.monotonic() > until:
            return file
        time.sleep(0.01)


def _locked(path: Path) -> IO[str] | None:
    """Returns the file, locked; None if another process holds it or just removed it."""
    with suppress(BlockingIOError, FileNotFoundError), ExitStack() as stack:
        file = stack.enter_context(path.open("r+", encoding="utf-8"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last holder may have removed the file before this process locked it.
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            stack.pop_all()
            return file
    return None


def owner(path: Path) -> Owner | None:
    """Returns the live holder of a lease, or None."""
    with suppress(OSError), private_files.regular(path) as file:
        try:  # shared, so that readers do not take each other for the holder
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _owner_in(path)
    return None


def _owner_in(path: Path) -> Owner | None:
    """Returns the process that a lease file names, alive or not; None if it names none."""
    with suppress(OSError, ValueError):
        with private_files.regular(path) as file:
            pid, host, since = file.read(_LEASE_BYTES).decode().split()
        return Owner(int(pid), host, since)
    return None


# Temporary folders


class Folder:
    """A temporary folder, and the processes that got it as an option or keep their logs in it, as
    those of Ray do: they end with it."""

    def __init__(self, path: Path, note: Path) -> None:
        self.path, self._note = path, note

    def clear(self, processes: Iterable[psutil.Process] = ()) -> None:
        """Ends its processes and the given ones, and removes the folder, then the note; a folder
        that something still writes to stays for the next command, with the note."""
        import psutil

        doomed = [*processes]
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if self._is_used_by(process):
                    doomed += families([process])
        for process in doomed:
            with suppress(psutil.Error):
                process.kill()
        until = time.monotonic() + GRACE_S
        while any(map(lives, doomed)) and time.monotonic() < until:
            time.sleep(0.01)
        with suppress(OSError):
            if self.path.lstat().st_uid == os.geteuid():
                shutil.rmtree(self.path)
        with suppress(OSError):
            if not os.path.lexists(self.path):
                self._note.unlink(missing_ok=True)

    def _is_used_by(self, process: psutil.Process) -> bool:
        """Tells whether a process got the folder as an option. Workers of Ray overwrite theirs, and
        outlive a killed Ray for seconds: they have their logs in the folder open."""
        words = process.cmdline()
        if words and words[0].startswith("ray::"):
            return any(file.path.startswith(f"{self.path}/") for file in process.open_files())
        return f"={self.path}/" in " ".join(words)


@contextmanager
def temporary_folder(kind: str, parent: Path | None = None) -> Iterator[Folder]:
    """Yields a private folder; removes it, and ends its processes, when the block ends.

    Args:
        kind: the beginning of its name.
        parent: the folder to make it in, by default that of temporary files.

    Raises:
        OSError: it, or its note, cannot be written.
    """
    remove_folders()
    name = f"{kind}-{secrets.token_hex(4)}"
    note = private_files.folder(private_files.create_home() / "running") / f"{name}.json"
    made = Folder(Path(parent or tempfile.gettempdir(), name).absolute(), note)
    file = _acquire(note)
    if file is None:
        raise TimeoutError(f"{note} is locked by another process")
    with file:
        try:
            fields = {"host": socket.gethostname(), "folder": str(made.path)}
            print(json.dumps(fields), file=file, flush=True)
            made.path.mkdir(mode=private_files.FOLDER)
            yield made
        finally:
            made.clear()


def remove_folders() -> None:
    """Removes what killed processes of this user on this machine left; never raises."""
    for note in (private_files.home() / "running").glob("*.json"):
        # A note of anything else is ignored.
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            if (file := _locked(note)) is not None:
                with file:
                    fields, ours = json.load(file), os.fstat(file.fileno()).st_uid == os.geteuid()
                    path, here = Path(fields["folder"]), fields["host"] == socket.gethostname()
                    named = _NAME.fullmatch(path.name) and path.name == note.stem
                    if ours and here and named and path.is_absolute():
                        Folder(path, note).clear()


def families(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Returns processes with all their descendants."""
    import psutil

    members = []
    for process in processes:
        with suppress(psutil.Error):
            members += [process, *process.children(recursive=True)]
    return members


def lives(process: psutil.Process) -> bool:
    """Returns whether a process runs; a killed one is a zombie until its parent collects it."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
