"""Leases: at most one driver and one tracker per sweep.

A lease is a file lock (``flock``) on a small file beside the store that names its holder, so the
kernel frees it when the holder ends, however it ends. A file that names a process and is not locked
was left by a killed process. If the file system keeps locks per machine, a driver on a second one
can take the lease; both drivers then report it.
"""

from __future__ import annotations

import fcntl
import glob
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ringray.base import private_files
from ringray.base.errors import PlaceError, reason_of

_NAMED = 1024  # bytes of a lease file, at most
_RETRY_S = 0.5  # seconds; `owner` may hold a free lock for a moment


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds or held a lease; ``str()`` is for messages."""

    pid: int
    host: str
    since: str

    @property
    def near(self) -> bool:
        """True if it runs on this machine."""
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"process {self.pid}" + ("" if self.near else f" on {self.host}")


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
    until = time.monotonic() + _RETRY_S
    try:
        while (file := _lock(path)) is None:
            if time.monotonic() > until:
                raise PlaceError(refusal(owner=_named(path) or Owner(0, "?", "")))
            time.sleep(0.01)
        before = _named(path)
        file.truncate()
        print(me.pid, me.host, me.since, file=file, flush=True)
    except OSError as error:
        raise PlaceError(
            f"the lock {path} cannot be taken: {reason_of(error)}; free some "
            "space, or use another store with --store FILE, on a file system with file locks"
        ) from error
    with file:
        if before is not None and not before.near and note is not None:
            note(f"{before} did not end this sweep; its lock is free, so this driver takes over")
        try:
            yield lambda: _named(path) == me
        finally:
            with suppress(OSError):
                if _named(path) == me:
                    path.unlink()


def users(store: Path) -> list[Owner]:
    """Returns the live holders of all leases of a store."""
    return [holder for path in _paths(store) if (holder := owner(path))]


def dead(store: Path) -> list[Owner]:
    """Returns the drivers of this machine that were killed and whose lease files remain."""
    drivers = [path for path in _paths(store) if path.name.endswith(".driver.lock")]
    holders = [(_named(path), owner(path)) for path in drivers]
    return [named for named, live in holders if named and named.near and live is None]


def bury(store: Path) -> None:
    """Removes the files that killed processes of this machine left."""
    for path in _paths(store):
        with suppress(OSError):
            named = _named(path)
            if named and named.near and (file := _lock(path)):
                path.unlink()  # while it is locked: another process may be about to take it
                file.close()


def path_of(store: Path, digest: str, role: str) -> Path:
    """Returns the file of a sweep's lease for a ``role``, beside the store."""
    store = store.resolve()
    return store.with_name(f".{store.name}.{digest[:12]}.{role}.lock")


def _paths(store: Path) -> list[Path]:
    store = store.resolve()
    return sorted(store.parent.glob(f".{glob.escape(store.name)}.*.lock"))


def _lock(path: Path) -> IO[str] | None:
    """Returns the file, locked; None if another process holds it or just removed it."""
    private_files.create(path)
    with suppress(BlockingIOError, FileNotFoundError), ExitStack() as stack:
        file = stack.enter_context(path.open("r+", encoding="utf-8"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            stack.pop_all()
            return file
    return None


def owner(path: Path) -> Owner | None:
    """Returns the live holder of a lease, or None."""
    with suppress(OSError), private_files.regular(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _named(path)
    return None


def _named(path: Path) -> Owner | None:
    with suppress(OSError, ValueError):
        with private_files.regular(path) as file:
            pid, host, since = file.read(_NAMED).decode().split()
        return Owner(int(pid), host, since)
    return None
