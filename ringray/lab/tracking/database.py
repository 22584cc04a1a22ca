"""MLflow's sqlite database, created whole or not at all.

MLflow fills a new database in some forty migrations, table by table. Two processes that do it at
once both fail, and one that is killed leaves a file that no later process can use. So it is filled
under another name, under a lock, and then moved into place.
"""

from __future__ import annotations

from mlflow import MlflowClient

from ringray.base import locks, private_files
from ringray.lab.tracking.location import sqlite_path, sqlite_uri


def client_of(uri: str) -> MlflowClient:
    """Returns a client for ``uri``; creates a sqlite database that is absent or empty."""
    path = sqlite_path(uri)
    if path is not None:
        with private_files.locked(path):
            if not path.exists() or not path.stat().st_size:
                # A new name each time: MLflow keeps connections by it.
                with locks.temporary_folder(".mlflow", path.parent) as folder:
                    new = folder.path / "new.db"
                    private_files.database(new)
                    MlflowClient(tracking_uri=sqlite_uri(new)).search_experiments(max_results=1)
                    new.replace(path)
    return MlflowClient(tracking_uri=uri)
