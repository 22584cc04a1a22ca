"""MLflow's sqlite database, created whole or not at all.

MLflow fills a new database in some forty migrations, table by table. Two processes that do it at
once both fail, and one that is killed leaves a file that no later process can use. So it is filled
under another name, under a lock, and then moved into place.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path

from mlflow import MlflowClient

from ringray.base import locks, private_files
from ringray.lab.tracking.location import sqlite_path, sqlite_uri


def client_of(uri: str) -> MlflowClient:
    """Returns a client for ``uri``; creates a sqlite database that is absent, empty or half made.

    One with runs is left to MLflow, whose error says what to do. A half-made one without runs is
    kept as ``NAME.incomplete-TIME``.
    """
    path = sqlite_path(uri)
    if path is not None:
        with private_files.locked(path):
            if not _asked(path, "SELECT run_uuid FROM runs LIMIT 1"):
                _create(path)
    return MlflowClient(tracking_uri=uri)


def _create(path: Path) -> None:
    # A new name each time: MLflow keeps connections by it, and leaves a lock file for each in the
    # folder for temporary files.
    with locks.temporary_folder(".mlflow", path.parent) as folder:
        before, tempfile.tempdir = tempfile.tempdir, str(folder.path)
        try:
            new = folder.path / "new.db"
            private_files.database(new)
            MlflowClient(tracking_uri=sqlite_uri(new)).search_experiments(max_results=1)
        finally:
            tempfile.tempdir = before
        version = "SELECT version_num FROM alembic_version"
        if _asked(path, version) == _asked(new, version):
            return
        if path.exists() and path.stat().st_size:
            path.rename(path.with_name(f"{path.name}.incomplete-{int(time.time())}"))
        new.replace(path)


def _asked(path: Path, query: str) -> str | None:
    """Returns the first value, None if there is no row or no such table."""
    with closing(sqlite3.connect(path)) as db:
        try:
            row = db.execute(query).fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            row = None
    return str(row[0]) if row else None
