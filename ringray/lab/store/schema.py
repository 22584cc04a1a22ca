"""The store's file: opening it, its schema, and what a user is told when it cannot be used."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ringray.base import private_files
from ringray.base.errors import DamagedStore, PlaceError
from ringray.lab.store import snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUSY_S = 5.0
_APPLICATION_ID = 0x72696E67  # "ring": tells our database from another program's

_TABLES = """
CREATE TABLE environments (
    id TEXT PRIMARY KEY,        -- sha256 of content
    content TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE sweeps (
    digest TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    spec TEXT NOT NULL,
    source TEXT NOT NULL,
    environment TEXT NOT NULL REFERENCES environments (id),
    status TEXT NOT NULL,
    created REAL NOT NULL,
    updated REAL NOT NULL       -- when a driver last began or finished it
) WITHOUT ROWID;
CREATE TABLE trials (
    digest TEXT NOT NULL REFERENCES sweeps (digest),
    key TEXT NOT NULL,
    idx INTEGER NOT NULL,
    config TEXT NOT NULL,
    predicted TEXT NOT NULL,
    seq INTEGER NOT NULL DEFAULT 0,     -- 0 until it ended, then growing within the sweep
    status TEXT,
    reason TEXT,
    metrics TEXT NOT NULL DEFAULT '{}',
    samples TEXT NOT NULL DEFAULT '{}',
    point TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    started REAL,
    ended REAL,
    environment TEXT REFERENCES environments (id),
    PRIMARY KEY (digest, key)
) WITHOUT ROWID;
CREATE INDEX trials_by_seq ON trials (digest, seq);
CREATE TABLE leases (
    digest TEXT NOT NULL,
    role TEXT NOT NULL,
    token TEXT NOT NULL,
    pid INTEGER NOT NULL,
    birth TEXT NOT NULL,
    host TEXT NOT NULL,
    beat REAL NOT NULL,
    PRIMARY KEY (digest, role)
) WITHOUT ROWID;
"""


# A row's seal is a checksum of these columns, because sqlite notices no damage within a page. Of a
# sweep it covers what never changes between two begins, of a trial everything.
SWEEP = ("digest", "name", "kind", "spec", "source", "environment")
TRIAL = (
    "digest", "key", "idx", "config", "predicted", "seq", "status", "reason", "metrics", "samples",
    "point", "attempts", "started", "ended", "environment",
)  # fmt: skip
SWEEP_SEAL = f"seal_of({', '.join(SWEEP)})"
TRIAL_SEAL = f"seal_of({', '.join(TRIAL)})"


def seal_of(*values: str | float | None) -> str:
    """The seal of a row with these values."""
    return sha256(json.dumps(values).encode()).hexdigest()[:16]


def _create(db: sqlite3.Connection) -> None:
    for statement in _TABLES.split(";\n"):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")


def _seal(db: sqlite3.Connection) -> None:
    for statement in (
        # Grows with each begin and finish of any sweep: clocks are set back, this is not.
        "ALTER TABLE sweeps ADD COLUMN turn INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE sweeps ADD COLUMN seal TEXT",
        "ALTER TABLE trials ADD COLUMN seal TEXT",
        # Where MLflow was once found to accept a sweep; without credentials.
        """CREATE TABLE tracked (digest TEXT PRIMARY KEY, uri TEXT NOT NULL,
        experiment_id TEXT NOT NULL, run_id TEXT NOT NULL) WITHOUT ROWID""",
        """UPDATE sweeps SET turn =
        (SELECT count(*) FROM sweeps AS older WHERE older.updated <= sweeps.updated)""",
        f"UPDATE sweeps SET seal = {SWEEP_SEAL}",
        f"UPDATE trials SET seal = {TRIAL_SEAL}",
    ):
        db.execute(statement)


# MIGRATIONS[n] takes a store of schema n to n + 1, in one transaction with the version's change.
# To change the schema, append a step; never edit one that was released.
MIGRATIONS: list[Callable[[sqlite3.Connection], None]] = [_create, _seal]


def connect(path: Path, create: bool) -> sqlite3.Connection:
    """Opens the store at ``path``, brought to the newest schema. Raises PlaceError."""
    _prepare(path, create)
    with failures(path):
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            db.create_function("seal_of", -1, seal_of, deterministic=True)
            # What was deleted is not to come back when a damaged file is searched for rows.
            db.execute("PRAGMA secure_delete = ON")
            _migrate(db, path)
            _use_wal(db)
            # In WAL mode NORMAL survives the end of the process at any moment; a power cut can
            # lose the last transactions but never damages the file.
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            db.close()
            raise
    return db


@contextmanager
def transaction(db: sqlite3.Connection, path: Path) -> Iterator[sqlite3.Connection]:
    """All or nothing; takes the write lock at once, so that commits follow each other's reads."""
    with failures(path):
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            _roll_back(db)
            raise


def _roll_back(db: sqlite3.Connection) -> None:
    if db.in_transaction:  # on some errors (a full disk) sqlite has rolled back already
        db.execute("ROLLBACK")


@contextmanager
def failures(path: Path) -> Iterator[None]:
    """Turns what sqlite says about ``path`` into a PlaceError with the way out."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or _DAMAGE.match(str(error)):
            raise damaged(path, f"sqlite: {error}") from error
        advice = _ADVICE.get(code)
        if advice is None:
            raise  # a mistake in our own SQL
        raise PlaceError(f"the store {path} {advice} (sqlite: {error})") from error


_ELSEWHERE = "or use another store with --store FILE"
# Pages of the schema hold something else, or a text is none.
_DAMAGE = re.compile(
    "no such (table|column)|unsupported file format|malformed database schema|"
    "user-defined function raised|could not decode to utf-8",
    re.IGNORECASE,
)
_ADVICE = {
    sqlite3.SQLITE_BUSY: f"is locked by another process; end that process, {_ELSEWHERE}",
    sqlite3.SQLITE_LOCKED: f"is locked by another process; end that process, {_ELSEWHERE}",
    sqlite3.SQLITE_READONLY: f"is not writable; change its permissions, {_ELSEWHERE}",
    sqlite3.SQLITE_PERM: f"is not accessible; change its permissions, {_ELSEWHERE}",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; check that it and its folder are writable, "
    + _ELSEWHERE,
    sqlite3.SQLITE_IOERR: "cannot be read or written: the disk reports an error or has no space "
    f"left; free some space, {_ELSEWHERE}",
    sqlite3.SQLITE_FULL: "cannot grow: its disk is full; free some space and resume, " + _ELSEWHERE,
}


def damaged(path: Path, why: str) -> DamagedStore:
    """The error for a store that cannot be read, or not all of it."""
    if "not a database" in why:
        return DamagedStore(
            f"the store {path} is not a database, or its beginning is destroyed; name a ringray "
            f"store or a new file, or see what `ringray recover --store {path}` can read of it"
        )
    return DamagedStore(
        f"the store {path} is damaged ({why}); `ringray recover --store {path}` saves what can be "
        "read of it and keeps the damaged file"
    )


def check(db: sqlite3.Connection, path: Path) -> None:
    """Reads the whole file for damage: 10 ms for 1,000 trials.

    Raises:
        DamagedStore: there is some.
    """
    with failures(path):
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise damaged(path, str(found).replace("\n", " "))


def _prepare(path: Path, create: bool) -> None:
    """Says clearly what is wrong with the place before sqlite says it vaguely."""
    try:
        if path.is_dir():
            raise PlaceError(
                f"the store {path} is a directory; name a file in it, as in {path / 'store.db'}"
            )
        if path.exists():
            if not path.is_file():
                raise PlaceError(f"the store {path} is not a regular file; name another file")
            if not os.access(path, os.R_OK | os.W_OK):
                raise PlaceError(
                    f"the store {path} is not writable; change its permissions, {_ELSEWHERE}"
                )
            private_files.database(path)
            if not create and path.stat().st_size == 0:
                raise damaged(path, "the file is empty")
            return
        if not create:
            raise PlaceError(
                f"there is no store at {path}; `ringray run SPEC` makes one, "
                "--store FILE or RINGRAY_HOME names another"
            )
        if path.parent.exists() and not path.parent.is_dir():
            raise PlaceError(
                f"the store {path} cannot be created: {path.parent} is a file, not a directory; "
                "name a file in a directory"
            )
        private_files.above(path)
        # Created here and not by sqlite, for the mode; its -wal and -shm files take the same.
        private_files.database(path)
    except OSError as error:
        raise PlaceError(
            f"the store {path} cannot be created or opened: {_why(error)}; "
            f"make its folder writable, {_ELSEWHERE}"
        ) from error


def _migrate(db: sqlite3.Connection, path: Path) -> None:
    db.execute("BEGIN")  # another process may be creating it: all reads see one moment
    try:
        version = _version(db, path)
    finally:
        _roll_back(db)
    if version == len(MIGRATIONS):
        return
    if version:
        snapshot.take(db, path)
    with transaction(db, path):
        version = _version(db, path)  # another process may have been faster
        for step in MIGRATIONS[version:]:
            step(db)
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _version(db: sqlite3.Connection, path: Path) -> int:
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    ours = db.execute("PRAGMA application_id").fetchone()[0] == _APPLICATION_ID
    if not ours and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise PlaceError(
            f"the store {path} is a database of another program; name a ringray store or a new file"
        )
    if version > len(MIGRATIONS):
        raise PlaceError(
            f"the store {path} was written by a newer ringray (schema {version}, this one knows "
            f"{len(MIGRATIONS)}); upgrade ringray, {_ELSEWHERE}"
        )
    return version


def _use_wal(db: sqlite3.Connection) -> None:
    """Readers and the writer then never wait for each other.

    The switch itself does not wait for other processes as busy_timeout promises, so it is tried
    again. A filesystem without shared memory stays in rollback mode, which is slower but right.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _why(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
