"""The place of an open store: whether its file is still there, and what to do if it is not."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from ringray.base import private_files
from ringray.base.errors import PlaceError


class OpenFile:
    """The file of a store that has just been opened."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.stat()
        self._lost: PlaceError | None = None

    def check(self, db: sqlite3.Connection) -> None:
        """Raises PlaceError if the file was deleted or replaced, which sqlite tolerates; the
        content of ``db`` is then saved beside the path, and the error says where."""
        if not self._holds():
            self._lost = self._lost or self._error(_rescued(db, self._path))
            raise self._lost

    def _holds(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), self._file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a network that is away; sqlite reports it
            return True

    def _error(self, copy: Path | None) -> PlaceError:
        where = f"all that it held is in {copy}: `ringray resume SWEEP --store {copy}` continues"
        if copy is None:
            where = (
                "what it held could not be saved; `ringray resume SWEEP --from-mlflow` restores "
            )
            where += "what MLflow has"
        how = "replaced" if self._path.exists() else "deleted"
        return PlaceError(f"the store {self._path} was {how} while it is in use; {where}")


def _rescued(db: sqlite3.Connection, path: Path) -> Path | None:
    """Copies ``db`` beside ``path``; returns the copy, or None if that fails."""
    rescued = path.with_name(f"{path.name}.rescued-{int(time.time())}")
    try:
        private_files.above(rescued)
        private_files.database(rescued)
        with closing(sqlite3.connect(rescued)) as copy:
            db.backup(copy)
    except (OSError, sqlite3.Error):
        return None
    return rescued
