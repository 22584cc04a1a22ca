"""Stores as others leave them: of older schemas, of a killed driver, of another program."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from ringray.lab.store import schema
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome, Tracked
from tests.support.small_spec import fill

SCHEMAS = range(1, len(schema.MIGRATIONS) + 1)
LOGS = ("-wal", "-shm", "-journal")


def write(path: Path, version: int) -> None:
    """Writes a sweep with three ended trials of six, one of them measured twice, in a schema."""
    current = path.with_name("current.db")
    digest = fill(current).digest
    with Store(current) as store:
        again = Outcome("ok", None, {"median_ms": 11.0}, {"ms": [1.0, 2.0]}, "p" * 64, 1, 3.0, 4.0)
        failed = Outcome("failed", "it broke", {}, {}, "q" * 64, 3, 5.0, 6.0)
        first, _, third, *_ = store.trials(digest)
        store.record(digest, first.key, again)
        store.record(digest, third.key, failed)
        store.finish(digest, "failed")
        store.accepted(digest, Tracked("sqlite:////srv/mlflow.db", "1", "r" * 32))
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.create_function("seal_of", -1, schema.seal_of)
        for step in schema.MIGRATIONS[:version]:
            for statement in step:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {version}")
        db.execute("ATTACH ? AS current", (str(current),))
        named = db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")
        for (table,) in named.fetchall():
            ours, theirs = (
                {row[1]: None for row in db.execute(f"PRAGMA {place}.table_info({table})")}
                for place in ("main", "current")
            )
            columns = ", ".join(name for name in ours if name in theirs)
            db.execute(f"DELETE FROM main.{table}")
            if columns:
                db.execute(
                    f"INSERT INTO main.{table} ({columns}) SELECT {columns} FROM current.{table}"
                )
        db.execute("DETACH current")
        db.execute("PRAGMA journal_mode = WAL")
    for one in current.parent.glob(f"{current.name}*"):
        one.unlink()


def leave_log(path: Path, mode: str) -> None:
    """Leaves a store as a killed driver does, with a log (``mode`` WAL), of which the first page
    was moved into the file already, or a journal that must be played back (DELETE)."""
    write(path, len(schema.MIGRATIONS))
    live = path.with_name("live.db")
    path.rename(live)
    with closing(sqlite3.connect(live, isolation_level=None)) as db:
        db.create_function("seal_of", -1, schema.seal_of)
        db.execute(f"PRAGMA journal_mode = {mode}")
        db.execute("PRAGMA cache_size = 1")  # so that pages are written before the end
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO environments VALUES ('x', hex(zeroblob(40000)))")  # it grows
        db.execute("UPDATE sweeps SET status = 'interrupted'")
        if mode == "WAL":
            db.execute("COMMIT")
        else:
            db.execute("UPDATE trials SET samples = '[' || hex(zeroblob(40000)) || ']'")
        for ending in ("", *LOGS):
            if (one := Path(f"{live}{ending}")).exists():
                shutil.copyfile(one, f"{path}{ending}")
        if mode == "DELETE":
            db.execute("ROLLBACK")
        else:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            with path.open("r+b") as file:
                file.write(live.read_bytes()[:4096])
    for one in path.parent.glob(f"{live.name}*"):
        one.unlink()
    for one in path.parent.glob(f"{path.name}*"):
        one.chmod(0o600)
    digest = "0" * 12
    path.with_name(f".{path.name}.{digest}.driver.lock").write_text("1 elsewhere 1.5\n")
