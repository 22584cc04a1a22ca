"""The snapshot of a store: a whole copy beside it, from which ``ringray recover`` fills gaps."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from ringray.base import private_files


def path_of(store: Path) -> Path:
    """Returns the path of the snapshot of the store at ``store``."""
    return store.with_name(f"{store.name}.snapshot")


def take(db: sqlite3.Connection, store: Path) -> None:
    """Replaces the snapshot by a copy of ``db``; keeps the old one if the copy is not whole.

    A snapshot is a precaution: without room for one the sweep goes on.
    """
    part = store.with_name(f".{store.name}.snapshot.{os.getpid()}")
    with suppress(OSError, sqlite3.Error):
        if copy(db, part):
            part.replace(path_of(store))
    with suppress(OSError):
        part.unlink(missing_ok=True)


def copy(db: sqlite3.Connection, path: Path) -> bool:
    """Writes a copy of ``db``, one file without a log; returns whether it is whole."""
    private_files.create(path)
    with closing(sqlite3.connect(path)) as written:
        db.backup(written)
        written.execute("PRAGMA journal_mode = DELETE")
        return bool(written.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
