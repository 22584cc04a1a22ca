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


def take(db: sqlite3.Connection, store: Path, broken: str = "SELECT 1 WHERE false") -> None:
    """Replaces the snapshot by a copy of ``db``; keeps the old one if the copy is not whole.

    A snapshot is a precaution: without room for one the sweep goes on.

    Args:
        broken: a query that returns a row if the content is damaged.
    """
    part = store.with_name(f".{store.name}.snapshot.{os.getpid()}")
    with suppress(OSError, sqlite3.Error):
        private_files.create(part)
        with closing(sqlite3.connect(part)) as copy:
            db.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file, without a log
            whole = copy.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
        if whole and db.execute(broken).fetchone() is None:
            part.replace(path_of(store))
    with suppress(OSError):
        part.unlink(missing_ok=True)
