"""The store's file: its schema, how it is opened, and messages if it cannot be used."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringray.base import locks, private_files
from ringray.base.errors import DamagedStore, PlaceError, reason_of
from ringray.lab.store import snapshot

BUSY_S = 5.0  # seconds to wait for another process's lock
_APPLICATION_ID = 0x72696E67  # "ring"; marks the file as a store
NEWEST = 4  # the schema of _TABLES

SWEEP = ("digest", "name", "kind", "spec", "source", "environment")
TRIAL: tuple[str, ...] = ("digest", "key", "idx", "config", "predicted", "seq", "status", "reason")
TRIAL += ("metrics", "samples", "point", "attempts", "started", "ended", "environment")

_TABLES = f"""
CREATE TABLE IF NOT EXISTS environments (
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
    updated REAL NOT NULL,      -- when a driver last began or finished it
    turn INTEGER NOT NULL       -- grows with each of these, unlike a clock, which may be set back
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
    metrics TEXT NOT NULL DEFAULT '{{}}',
    samples TEXT NOT NULL DEFAULT '{{}}',
    point TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    started REAL,
    ended REAL,
    environment TEXT REFERENCES environments (id),
    current INTEGER NOT NULL DEFAULT 1, -- one row of each trial; the others are its history
    PRIMARY KEY (digest, key, seq)
) WITHOUT ROWID;
CREATE INDEX trials_by_seq ON trials (digest, seq);
-- The place at which MLflow accepted a sweep; without credentials.
CREATE TABLE IF NOT EXISTS tracked (
    digest TEXT PRIMARY KEY,
    uri TEXT NOT NULL,
    experiment_id TEXT NOT NULL,
    run_id TEXT NOT NULL
) WITHOUT ROWID;
-- The name of this store among those that write to one MLflow.
CREATE TABLE IF NOT EXISTS identity (id TEXT NOT NULL);
INSERT INTO identity SELECT lower(hex(randomblob(16))) WHERE NOT EXISTS (SELECT 1 FROM identity);
PRAGMA application_id = {_APPLICATION_ID}
"""

# _STEPS[n] takes a store of schema n to n + 1, in one transaction with the version's change; the
# first one makes a store. Schemas 2 and 3 had checksums of rows, which nothing reads any more.
_STEPS = [
    _TABLES,
    """
ALTER TABLE sweeps ADD COLUMN turn INTEGER NOT NULL DEFAULT 0;
UPDATE sweeps SET turn =
    (SELECT count(*) FROM sweeps AS older WHERE older.updated <= sweeps.updated)
""",
    "CREATE TABLE history AS SELECT * FROM trials WHERE false",
    f"""
ALTER TABLE sweeps RENAME TO old_sweeps;
ALTER TABLE trials RENAME TO old_trials;
DROP INDEX trials_by_seq;
{_TABLES};
INSERT INTO sweeps SELECT {", ".join(SWEEP)}, status, created, updated, turn FROM old_sweeps;
INSERT INTO trials SELECT {", ".join(TRIAL)}, 1 FROM old_trials;
INSERT INTO trials SELECT {", ".join(TRIAL)}, 0 FROM history;
DROP TABLE history;
DROP TABLE old_trials;
DROP TABLE old_sweeps;
DROP TABLE leases
""",
]


class Damage(ValueError):
    """A row cannot be read; the message names it."""


def resolved(path: str | Path) -> Path:
    """Returns the path of a store without links: all of its files lie beside the file itself.
    Raises PlaceError for a circle of links."""
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        why = f"cannot be opened: {reason_of(error)}; name another file"
        raise PlaceError(f"the store {path} {why}") from None


def connect(path: Path, create: bool) -> sqlite3.Connection:
    """Opens the store at ``path`` and takes it to the newest schema. Raises PlaceError."""
    prepare(path, create)
    with failures(path):
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            if 0 < _version(db, path) < NEWEST:
                for user in locks.live_owners(path):
                    why = f"is used by {user} of an older ringray; wait for it, or end that process"
                    raise PlaceError(f"the store {path} {why}")
                snapshot.take(db, path)
            upgrade(db, path, create=True)
            _use_wal(db)
            # In WAL mode with NORMAL the end of the process loses nothing; a power cut can lose
            # the last transactions but never damages the file.
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            db.close()
            raise
    return db


@contextmanager
def transaction(db: sqlite3.Connection, path: Path) -> Iterator[sqlite3.Connection]:
    """Opens a transaction that takes the write lock at once: no commit is between its reads and
    its writes."""
    with failures(path):
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # on some errors (a full disk) sqlite rolls back by itself
                db.execute("ROLLBACK")
            raise


@contextmanager
def failures(path: Path) -> Iterator[None]:
    """Turns errors of the store at ``path`` into a PlaceError with the way out."""
    try:
        yield
    except Damage as error:
        raise damaged(path, str(error)) from None
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or _DAMAGE.match(str(error)):
            raise damaged(path, f"sqlite: {reason_of(error)}") from error
        advice = _ADVICE.get(code)
        if advice is None:
            raise  # a mistake in our own SQL
        why = f"{advice}, {_ELSEWHERE} (sqlite: {reason_of(error)})"
        raise PlaceError(f"the store {path} {why}") from error


_ELSEWHERE = "or use another store with --store FILE"
# The pages of the schema have other content, or a text is not UTF-8.
_DAMAGE = re.compile(
    "no such (table|column)|unsupported file format|could not decode to utf-8", re.IGNORECASE
)
_NO_SPACE = "the disk reports an error or has no space left; free some space"
_ADVICE = {
    sqlite3.SQLITE_BUSY: "is locked by another process; end that process",
    sqlite3.SQLITE_LOCKED: "is locked by another process; end that process",
    sqlite3.SQLITE_READONLY: "is not writable; change its permissions",
    sqlite3.SQLITE_PERM: "is not accessible; change its permissions",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened; check that it and its folder are writable",
    sqlite3.SQLITE_IOERR: f"cannot be read or written: {_NO_SPACE}",
    sqlite3.SQLITE_FULL: "cannot grow: its disk is full; free some space and resume",
}


def damaged(path: Path, why: str) -> DamagedStore:
    """Returns the error for a store that cannot be read as a whole."""
    if "not a database" in why:
        return DamagedStore(
            f"the store {path} is not a database, or its beginning is destroyed; name a ringray "
            f"store or a new file, or try `ringray recover --store {path}`"
        )
    return DamagedStore(
        f"the store {path} is damaged ({why}); `ringray recover --store {path}` saves its readable "
        "part and keeps the damaged file"
    )


def prepare(path: Path, create: bool, writes: bool = True) -> None:
    """Checks the place: sqlite's own messages are vague. Changes nothing unless it ``writes``.

    Raises:
        PlaceError: it cannot be used; to read it, also if another user may have written it.
    """
    try:
        if path.is_dir():
            advice = f"name a file in it, as in {path / 'store.db'}"
            raise PlaceError(f"the store {path} is a directory; {advice}")
        if path.exists():
            if not path.is_file():
                raise PlaceError(f"the store {path} is not a regular file; name another file")
            if not os.access(path, os.R_OK | os.W_OK if writes else os.R_OK):
                lack = f"is not {'writable' if writes else 'readable'}"
                raise PlaceError(f"the store {path} {lack}; change its permissions, {_ELSEWHERE}")
            if not writes:
                private_files.refuse_foreign(path)
            if not create and path.stat().st_size == 0:
                raise damaged(path, "the file is empty")
        elif not create:
            raise PlaceError(
                f"there is no store at {path}; `ringray run SPEC` creates one, "
                "--store FILE or RINGRAY_HOME names another"
            )
        else:
            if path.parent.exists() and not path.parent.is_dir():
                raise PlaceError(
                    f"the store {path} cannot be created: {path.parent} is a file, not a "
                    "directory; name a file in a directory"
                )
            private_files.above(path)
        if writes:
            # Created here and not by sqlite, for the mode; its -wal and -shm files take the same.
            private_files.database(path)
    except OSError as error:
        raise PlaceError(
            f"the store {path} cannot be created or opened: {reason_of(error)}; "
            f"make its folder writable, {_ELSEWHERE}"
        ) from error


def upgrade(db: sqlite3.Connection, path: Path, create: bool = False) -> None:
    """Takes ``db``, the content of the store at ``path``, to the newest schema. Raises PlaceError
    if it is no store, or none yet and ``create`` is not set."""
    if _version(db, path) == NEWEST:
        return
    with transaction(db, path):
        version = _version(db, path)  # another process may have been faster
        if not version and not create:
            raise damaged(path, "the file is empty")
        for script in _STEPS[version:] if version else [_TABLES]:
            for statement in script.split(";\n"):
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {NEWEST}")


def _version(db: sqlite3.Connection, path: Path) -> int:
    """Returns the schema of a store, 0 if it is empty; PlaceError if it cannot be used."""
    # In one query: another process may be creating it.
    query = (
        "SELECT user_version, application_id, (SELECT count(*) FROM sqlite_master) "
        "FROM pragma_user_version, pragma_application_id"
    )
    version, application, objects = db.execute(query).fetchone()
    if objects and application != _APPLICATION_ID:
        raise PlaceError(
            f"the store {path} is a database of another program; name a ringray store or a new file"
        )
    if version > NEWEST:
        raise PlaceError(
            f"the store {path} was written by a newer ringray (schema {version}, this one knows "
            f"{NEWEST}); upgrade ringray, {_ELSEWHERE}"
        )
    return int(version)


def _use_wal(db: sqlite3.Connection) -> None:
    """Switches to WAL mode, in which readers and the writer never wait for each other.

    The switch itself ignores busy_timeout, so it is repeated. A file system without shared memory
    stays in rollback mode, which is slower but correct.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
