"""``ringray recover``: a new store from a damaged one, its log and its snapshot.

Rows are read one by one through sqlite, by the keys that the table or its index still lists. The
snapshot supplies what is not readable any more.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from ringray.base import locks
from ringray.base.errors import DamagedStore, PlaceError, reason_of
from ringray.lab.store import rows, snapshot
from ringray.lab.store.schema import TRIAL, Damage, resolved, upgrade
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import UNKNOWN, Kept, SweepRow


class Saved(NamedTuple):
    """The saved part of one sweep."""

    sweep: SweepRow  # of the kind UNKNOWN if its own row is lost
    trials: int
    ended: int  # of these trials
    earlier: int  # measurements


class Recovered(NamedTuple):
    """The result."""

    aside: Path | None  # the new path of the damaged file; None if the store was whole
    sweeps: tuple[Saved, ...]


def recover(path: Path) -> Recovered:
    """Replaces a damaged store by a new one with everything that can be read.

    Raises:
        PlaceError: there is no file, nothing in it can be read, a live process uses it, or the
            new one cannot be written; the store is then as it was.
    """
    path = resolved(path)
    for user in locks.live_owners(path):
        raise PlaceError(f"the store {path} is used by {user}; end that process first")
    if _whole(path):
        return Recovered(None, ())
    try:
        with locks.temporary_folder(".recovering", path.parent) as folder, ExitStack() as stack:
            new, sources = folder.path / "new.db", []
            for source in (path, snapshot.path_of(path)):
                copy = folder.path / source.name
                for ending in ("", "-wal"):
                    with suppress(FileNotFoundError):
                        shutil.copyfile(f"{source}{ending}", f"{copy}{ending}")
                db = stack.enter_context(closing(sqlite3.connect(copy, isolation_level=None)))
                with suppress(PlaceError, sqlite3.Error):
                    db.execute("PRAGMA writable_schema = ON")  # reads a truncated file, too
                    upgrade(db, copy)
                    sources.append(db)
            with Store(new) as store:
                saved = _fill(store, sources)
            if not saved:
                raise PlaceError(
                    f"nothing in {path} can be read as rows of a ringray store; move it away. "
                    "`ringray resume SWEEP --from-mlflow` rebuilds a sweep that MLflow has"
                )
            return Recovered(_exchange(path, new), saved)
    except OSError as error:
        raise PlaceError(
            f"the new store cannot be written beside {path}: {reason_of(error)}; {path} is as it "
            "was: free some space and try again"
        ) from error


def _whole(path: Path) -> bool:
    try:
        with Store(path, readonly=True) as store:
            store.check()
            for sweep in store.sweeps():
                store.trials(sweep.digest)
                store.history(sweep.digest)
            _ = store.identity
    except DamagedStore:
        return False
    return True


def _fill(store: Store, sources: list[sqlite3.Connection]) -> tuple[Saved, ...]:
    """Writes the rows of all sources, those of the first one before the others'; the sweeps that
    were created last come last."""
    environments = cache(partial(_environment, sources))
    sweeps: dict[str, SweepRow] = {}
    current, earlier = defaultdict[str, list[Kept]](list), defaultdict[str, list[Kept]](list)
    for db in reversed(sources):
        for (identity,) in _scan(db, "id FROM identity", "id"):
            store.identify(identity)
        for (digest,) in _scan(db, "digest FROM sweeps", "digest"):
            with suppress(sqlite3.Error, Damage):
                for sweep in rows.sweep_rows(db, environments, "WHERE digest = ?", digest):
                    sweeps[digest] = sweep
    for db in sources:
        for *row, is_current in _trials(db):
            with suppress(Damage):
                into = current if is_current else earlier
                into[row[0]].append(rows.recording(tuple(row), environments))
    for digest in {*current, *earlier} - {*sweeps}:
        # `ringray run SPEC` knows it by its digest and gives it its name again.
        name, kind = f"lost-{digest[:12]}", UNKNOWN
        sweeps[digest] = SweepRow(digest, name, kind, {}, "", {}, "interrupted", 0.0, 0.0)
    saved = []
    for sweep in sorted(sweeps.values(), key=lambda sweep: sweep.created):
        digest = sweep.digest
        store.restore(sweep, sweep.created, current[digest], earlier[digest])
        written = store.find(digest)
        ended, history = sum(written.counts.values()), len(store.history(digest))
        saved.append(Saved(written, written.total, ended, history))
    return tuple(saved)


def _environment(sources: list[sqlite3.Connection], identity: str) -> dict[str, Any]:
    """Returns an environment from the first source that has it; an unreadable one is empty."""
    for db in sources:
        with suppress(sqlite3.Error, Damage):
            return rows.environment(db, identity)
    return {}


def _trials(db: sqlite3.Connection) -> list[tuple[Any, ...]]:
    """Returns the rows of trials that can be read."""
    table, order = "trials NOT INDEXED", ("digest", "key", "seq")
    columns = ", ".join((*TRIAL, "current"))
    readable = {
        (row[0], row[1], row[5]): row for row in _scan(db, f"{columns} FROM {table}", *order)
    }
    # A walk stops at a damaged row, a search for one that the index names may lead past it.
    index = "digest, key, seq FROM trials INDEXED BY trials_by_seq"
    for name in _scan(db, index, "digest", "seq"):
        with suppress(sqlite3.Error):
            query = f"SELECT {columns} FROM {table} WHERE digest = ? AND key = ? AND seq = ?"
            if name not in readable and (row := db.execute(query, name).fetchone()):
                readable[name] = row
    # A destroyed page may read as rows without values.
    whole = [name for name in readable if all(map(isinstance, name, (str, str, int)))]
    return [readable[name] for name in sorted(whole)]


def _scan(db: sqlite3.Connection, what: str, *order: str) -> Iterator[tuple[Any, ...]]:
    """Yields rows from both ends of a table or an index up to a destroyed page."""
    for direction in ("ASC", "DESC"):
        by = ", ".join(f"{column} {direction}" for column in order)
        with suppress(sqlite3.Error):
            yield from db.execute(f"SELECT {what} ORDER BY {by}")


def _exchange(path: Path, new: Path) -> Path:
    """Puts ``new`` in the place of ``path``; returns the name under which the old file is kept."""
    endings = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{path.name}.damaged{ending}") for ending in endings)
    aside = next(name for name in names if not name.exists())
    for ending in ("", "-wal"):
        if (old := Path(f"{path}{ending}")).exists():
            try:
                os.link(old, f"{aside}{ending}")
            except OSError:  # a file system without links
                shutil.copy2(old, f"{aside}{ending}")
    # sqlite would take a log of the old file beside the new one for the new one's.
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    new.replace(path)
    return aside
