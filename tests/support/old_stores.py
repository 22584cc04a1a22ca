"""Stores as others leave them: of older schemas, of a killed driver."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from ringray.lab.store import schema, snapshot
from ringray.lab.store.store import Store

SCHEMAS = range(1, schema.NEWEST + 1)
LOGS = ("-wal", "-shm", "-journal")
_DATA = Path(__file__).resolve().parents[1] / "lab" / "store" / "data"


def write(path: Path, version: int) -> None:
    """Writes a sweep with three ended trials of eight, one of them measured twice, in a schema."""
    dump = _DATA / f"store_schema_{min(version, schema.NEWEST - 1)}.sql"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(dump.read_text(encoding="utf-8"))
        db.execute("PRAGMA journal_mode = WAL")
    path.chmod(0o600)
    if version == schema.NEWEST:
        Store(path).close()
        snapshot.path_of(path).unlink()


def leave_log(path: Path, mode: str) -> None:
    """Leaves a store as a killed driver does, with a log (``mode`` WAL), of which the first page
    was moved into the file already, or a journal that must be played back (DELETE)."""
    write(path, schema.NEWEST)
    live = path.with_name("live.db")
    path.rename(live)
    with closing(sqlite3.connect(live, isolation_level=None)) as db:
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
            if (file := Path(f"{live}{ending}")).exists():
                shutil.copyfile(file, f"{path}{ending}")
        if mode == "DELETE":
            db.execute("ROLLBACK")
        else:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            with path.open("r+b") as whole:
                whole.write(live.read_bytes()[:4096])
    for file in path.parent.glob(f"{live.name}*"):
        file.unlink()
    for file in path.parent.glob(f"{path.name}*"):
        file.chmod(0o600)
    digest = "0" * 12
    path.with_name(f".{path.name}.{digest}.driver.lock").write_text("1 elsewhere 1.5\n")
