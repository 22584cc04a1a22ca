"""Who works on a sweep: one process per sweep and role, and a dead one's place is free again.

A process is known by pid and birth, because pids are used again. Where pids can be compared (the
same boot of the same machine, the same container) the answer is exact. Of any other process
nothing can be known but its heartbeat in the store: whoever wants its place watches for one, on a
clock that nobody sets. Clocks of different machines are compared for display only.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ringray.base.errors import PlaceError
from ringray.lab.store.schema import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

BEAT_S = 5.0
STALE_S = 6 * BEAT_S
LOOK_S = 0.5  # between two looks at a heartbeat


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a lease; ``str()`` is for messages."""

    pid: int
    birth: str
    host: str
    beat: float

    @property
    def near(self) -> bool:
        """Whether its pid means something here."""
        return self.birth.rpartition("/")[0] == _pid_space()

    def alive(self) -> bool:
        """Of one elsewhere a guess, by the clocks of two machines."""
        if self.near:
            return birth(self.pid) == self.birth
        return abs(time.time() - self.beat) < STALE_S

    def __str__(self) -> str:
        place = "" if self.near or self.host == _host() else f" on {self.host}"
        return f"process {self.pid}{place}"


def birth(pid: int) -> str | None:
    """A text that this process alone has among all of this host's, or None when it is dead.

    On Linux this is the boot, the space of pids and the clock tick of its start: psutil's time of
    day would move when the clock is set. A zombie is dead: it will never write again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return _portable_birth(pid) if not Path("/proc/self/stat").exists() else None
    # The command name may hold spaces and brackets; the fields start after its last bracket.
    fields = stat.rpartition(")")[2].split()
    state, start = fields[0], fields[19]
    return None if state in "ZX" else f"{_pid_space()}/{start}"


def owner(db: sqlite3.Connection, digest: str, role: str) -> Owner | None:
    """The live holder of a lease, or None."""
    found = _holder(db, digest, role)
    return found if found and found.alive() else None


def bury(db: sqlite3.Connection) -> None:
    """Drops the leases of processes that have died here."""
    rows = db.execute("SELECT token, pid, birth, host, beat FROM leases").fetchall()
    owners = [(token, Owner(*rest)) for token, *rest in rows]
    dead = [(token,) for token, one in owners if one.near and not one.alive()]
    db.executemany("DELETE FROM leases WHERE token = ?", dead)


@contextmanager
def hold(
    write: Callable[[], AbstractContextManager[sqlite3.Connection]],
    path: Path,
    digest: str,
    role: str,
    refusal: Callable[[Owner], str],
    note: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """Holds the lease and yields its token. ``write`` opens a transaction on the store at ``path``.

    Where a process holds it of which only the heartbeat can be known, and which is silent, this
    takes ``STALE_S`` seconds; ``note`` is told so.

    Raises:
        PlaceError: a live process holds it; the message is ``refusal(owner)``.
    """
    token = os.urandom(16).hex()
    watched: Owner | None = None
    since = time.monotonic()
    while True:
        with write() as db:
            holder = _holder(db, digest, role)
            silent = holder == watched and time.monotonic() - since >= STALE_S
            if holder is None or silent or (holder.near and not holder.alive()):
                db.execute(
                    "REPLACE INTO leases (digest, role, token, pid, birth, host, beat) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (digest, role, token, os.getpid(), birth(os.getpid()) or "", _host(),
                     time.time()),
                )  # fmt: skip
                break
        if holder.near or watched not in (None, holder):
            raise PlaceError(refusal(holder))
        if watched is None:
            watched, since = holder, time.monotonic()
            if note:
                note(f"{holder} had this sweep; watching {STALE_S:.0f} s whether it still lives")
        time.sleep(LOOK_S)
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
                # Another value each time, also when the clock is set back between two beats.
                db.execute("UPDATE leases SET beat = ? WHERE token = ?", (time.time(), token))
            finally:
                db.close()
        except (PlaceError, sqlite3.Error):
            # The store's own user meets the same fault and reports it; here the next beat counts.
            continue


def _holder(db: sqlite3.Connection, digest: str, role: str) -> Owner | None:
    row = db.execute(
        "SELECT pid, birth, host, beat FROM leases WHERE digest = ? AND role = ?", (digest, role)
    ).fetchone()
    return Owner(*row) if row else None


@lru_cache(maxsize=1)
def _pid_space() -> str:
    """Names what pids are unique in: a boot, and of it one container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no Linux
        return _host()


def _portable_birth(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{_pid_space()}/{process.create_time():.0f}"
    except psutil.NoSuchProcess:
        return None


def _host() -> str:
    return socket.gethostname()
