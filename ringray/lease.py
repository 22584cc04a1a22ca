"""Who works on a sweep: one process per sweep and role, and a dead one's place is free again.

A process is known by pid, birth and host, because pids are used again. On this host the answer
is exact. Of a process on another host nothing can be known but its heartbeat in the store.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringray.errors import PlaceError
from ringray.store_file import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

BEAT_S = 30.0
STALE_S = 6 * BEAT_S


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a lease; ``str()`` is for messages."""

    pid: int
    birth: str
    host: str
    beat: float

    def alive(self) -> bool:
        if self.host != _host():
            return time.time() - self.beat < STALE_S
        return birth(self.pid) == self.birth

    def __str__(self) -> str:
        place = "" if self.host == _host() else f" on {self.host}"
        return f"process {self.pid}{place}"


def birth(pid: int) -> str | None:
    """A text that this process alone has among all of this host's, or None when it is dead.

    On Linux this is the boot and the clock tick of its start: psutil's time of day would move
    when the clock is set. A zombie is dead: it will never write again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return _portable_birth(pid) if not Path("/proc/self/stat").exists() else None
    # The command name may hold spaces and brackets; the fields start after its last bracket.
    fields = stat.rpartition(")")[2].split()
    state, start = fields[0], fields[19]
    return None if state in "ZX" else f"{boot}/{start}"


def owner(db: sqlite3.Connection, digest: str, role: str) -> Owner | None:
    """The live holder of a lease, or None."""
    row = db.execute(
        "SELECT pid, birth, host, beat FROM leases WHERE digest = ? AND role = ?", (digest, role)
    ).fetchone()
    found = Owner(*row) if row else None
    return found if found and found.alive() else None


@contextmanager
def hold(
    write: Callable[[], AbstractContextManager[sqlite3.Connection]],
    path: Path,
    digest: str,
    role: str,
    refusal: Callable[[Owner], str],
) -> Iterator[str]:
    """Holds the lease and yields its token. ``write`` opens a transaction on the store at ``path``.

    Raises:
        PlaceError: a live process holds it; the message is ``refusal(owner)``.
    """
    token = os.urandom(16).hex()
    with write() as db:
        holder = owner(db, digest, role)
        if holder is not None:
            raise PlaceError(refusal(holder))
        db.execute(
            "REPLACE INTO leases (digest, role, token, pid, birth, host, beat) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (digest, role, token, os.getpid(), birth(os.getpid()) or "", _host(), time.time()),
        )
    stop = threading.Event()
    heart = threading.Thread(
        target=_beat, args=(path, token, stop), name=f"ringray-lease-{role}", daemon=True
    )
    heart.start()
    try:
        yield token
    finally:
        stop.set()
        # A store that fails now has told its user already, and a dead owner's lease is free.
        with suppress(PlaceError), write() as db:
            db.execute("DELETE FROM leases WHERE token = ?", (token,))
        heart.join(timeout=1)


def _beat(path: Path, token: str, stop: threading.Event) -> None:
    while not stop.wait(BEAT_S):
        try:
            db = connect(path, create=False)
            try:
                db.execute("UPDATE leases SET beat = ? WHERE token = ?", (time.time(), token))
            finally:
                db.close()
        except (PlaceError, sqlite3.Error):
            # The store's own user meets the same fault and reports it; here the next beat counts.
            continue


def _portable_birth(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{process.create_time():.0f}"
    except psutil.NoSuchProcess:
        return None


def _host() -> str:
    return socket.gethostname()
