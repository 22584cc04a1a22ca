"""A copy in memory of a store that is only read.

It is made without a lock and without a file beside the store, so that reading needs no right to
write, works on a read-only mount and keeps no driver waiting.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ringray.base.errors import PlaceError, reason_of
from ringray.lab.store import schema

_LOGS = ("-wal", "-journal")
_LOG_HEADER = 32  # bytes; another one once sqlite writes the log from its start again
_State = tuple[Any, ...]  # differs once a file has changed


class MemoryCopy:
    """The store at ``path`` in the newest schema, as of the last ``refresh``.

    Raises:
        PlaceError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._state = path, _State()
        self.db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        try:
            self.refresh()
        except BaseException:
            self.db.close()
            raise

    def refresh(self) -> None:
        """Copies the store again if its files have changed."""
        schema.prepare(self._path, create=False, writes=False)
        try:
            if (now := _state(self._path)) != self._state:
                with schema.failures(self._path):
                    self.db.execute("PRAGMA query_only = OFF")
                    self._load()
                    schema.upgrade(self.db, self._path)
                    self.db.execute("PRAGMA query_only = ON")
        except OSError as error:
            why = f"cannot be read: {reason_of(error)}"
            raise PlaceError(f"the store {self._path} {why}") from error
        self._state = now

    def _load(self) -> None:
        """Copies until the file and its log fit, copied one after the other: while a log only
        grows they do, as it has all pages that are moved into the file meanwhile."""
        until = time.monotonic() + schema.BUSY_S
        while time.monotonic() < until:
            before, state = _generation(self._path), _state(self._path)
            try:
                _copy(self._path, self.db)
                if _generation(self._path) == before:
                    return
            except (OSError, sqlite3.Error):
                if _state(self._path) == state:
                    raise
        raise TimeoutError(f"its files changed all the time for {schema.BUSY_S:g} s")


def _copy(path: Path, db: sqlite3.Connection) -> None:
    # sqlite opens the file: if Python closed it, this process would lose its locks on it.
    with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as file:
        if not any(size for ending, size, *_ in _state(path) if ending):
            file.backup(db)
            return
        with tempfile.TemporaryDirectory(prefix="ringray-") as folder:
            copy = Path(folder, "store.db")
            # What the log still has to bring may lie behind the end of the file.
            file.execute("PRAGMA writable_schema = ON")
            with closing(sqlite3.connect(copy)) as target:
                target.execute("PRAGMA synchronous = OFF")
                file.backup(target)
            for ending in _LOGS:
                with suppress(FileNotFoundError):
                    shutil.copyfile(f"{path}{ending}", f"{copy}{ending}")
            with closing(sqlite3.connect(copy)) as whole:
                whole.backup(db)


def _generation(path: Path) -> _State:
    with suppress(FileNotFoundError), Path(f"{path}-wal").open("rb") as log:
        if header := log.read(_LOG_HEADER):
            return path.stat().st_ino, header
    return _state(path)


def _state(path: Path) -> _State:
    states = []
    for ending in ("", *_LOGS):
        with suppress(FileNotFoundError):
            now = Path(f"{path}{ending}").stat()
            states.append((ending, now.st_size, now.st_ino, now.st_mtime_ns))
    return tuple(states)
