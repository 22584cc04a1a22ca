"""``ringray recover``: a new store from a damaged one, its snapshot and its log.

Rows are read one by one through sqlite, by the keys that the table or its index still lists, and
are taken if their checksums hold. The snapshot supplies what is not readable any more.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ringray.base import locks
from ringray.base.errors import DamagedStore, PlaceError, reason_of
from ringray.lab.store import rows, snapshot
from ringray.lab.store.memory_copy import unchanged
from ringray.lab.store.schema import Damage, connect, resolved
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import UNKNOWN, Kept, SweepRow

_PAGE = 4096  # bytes; sqlite's default, which every store has
_SIZE = slice(28, 32)  # where the first page says how many there are; sqlite looks itself at 0
# Of each table what is read, and in which order.
_SCANS: dict[rows.Table, list[tuple[str, ...]]] = {
    "trials": [
        ("trials NOT INDEXED", "digest", "key"),
        ("trials INDEXED BY trials_by_seq", "digest", "seq"),
    ],
    "history": [("history", "digest", "key", "seq")],
}

Recording = tuple[str, int]  # key of a trial, and number in its sweep: 0 until the trial has ended


@dataclass(frozen=True)
class Saved:
    """Trials and facts that were saved of one sweep."""

    digest: str
    name: str
    trials: int
    ended: int  # of these trials
    lost: tuple[str, ...]  # keys of ended trials that cannot be read
    nameless: bool  # the sweep's own row is lost
    earlier: int  # saved earlier measurements
    lost_others: int  # lost measurements of trials that are not lost


@dataclass(frozen=True)
class Recovered:
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
        with locks.temporary_folder(".recovering", path.parent) as folder:
            return _recover(path, folder.path)
    except OSError as error:
        raise PlaceError(
            f"the new store cannot be written beside {path}: {reason_of(error)}; {path} is as it "
            "was: free some space and try again"
        ) from error


def _recover(path: Path, folder: Path) -> Recovered:
    old, new = folder / "old.db", folder / "new.db"
    unchanged(path, partial(_copy, path, old))
    Store(new).close()
    sources = [old]
    if snapshot.path_of(path).exists():
        sources.append(folder / "snapshot.db")
        _copy(snapshot.path_of(path), sources[1])
    with ExitStack() as stack:
        opened = []
        for source in sources:
            with suppress(PlaceError):
                opened.append(stack.enter_context(closing(_open(source, new))))
        with Store(new) as store:
            _keep_identity(store, opened)
            saved = _fill(store, opened)
    if not saved:
        raise PlaceError(
            f"nothing in {path} can be read as rows of a ringray store; move it away. "
            "`ringray resume SWEEP --from-mlflow` rebuilds a sweep that MLflow has"
        )
    return Recovered(_exchange(path, new), saved)


def _copy(path: Path, copy: Path) -> None:
    """Copies a store and its log as they are."""
    for ending in ("", "-wal"):
        with suppress(FileNotFoundError):
            shutil.copyfile(f"{path}{ending}", f"{copy}{ending}")


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


def _open(path: Path, new: Path) -> sqlite3.Connection:
    """Opens a copy. If its first page, the schema, is destroyed, it takes that of a new store:
    every store has the tables at the same places."""
    try:
        return connect(path, create=False)
    except PlaceError:
        page = bytearray(new.read_bytes()[:_PAGE])
        page[_SIZE] = bytes(4)
        with path.open("r+b") as file:
            file.write(page)
            file.truncate(max(path.stat().st_size, new.stat().st_size))
        return connect(path, create=False)


def _environment(sources: list[sqlite3.Connection], identity: str) -> dict[str, Any]:
    """Returns an environment from the first source that has it; an unreadable one is empty."""
    for db in sources:
        with suppress(sqlite3.Error, Damage):
            return rows.environment(db, identity)
    return {}


def _keep_identity(store: Store, sources: list[sqlite3.Connection]) -> None:
    """Gives ``store`` the identity of the first source that has one."""
    for db in sources:
        for (identity,) in _scan(db, "id FROM identity", "id"):
            if re.fullmatch(r"[0-9a-f]{32}", str(identity)):
                store.identify(identity)
                return


def _fill(store: Store, sources: list[sqlite3.Connection]) -> tuple[Saved, ...]:
    """Writes the rows of all sources, those of the first one before the others'; the sweeps that
    were created last come last."""
    environments = cache(partial(_environment, sources))
    listed = [{table: _listed(db, table) for table in rows.TABLES} for db in sources]
    sweeps = _sweeps(sources, environments)
    digests = sorted(sweeps, key=lambda digest: sweeps[digest].created)
    digests += sorted({digest for tables in listed for digest in tables["trials"]} - set(digests))
    saved = []
    for digest in digests:
        trials: list[list[Kept]] = []
        earlier: list[Kept] = []
        named = set()
        for db, tables in zip(sources, listed, strict=True):
            present, past = tables["trials"][digest], tables["history"][digest]
            read = partial(rows.trial_rows, db, environments, digest)
            trials.append(_rows(read, {(key,) for key, _ in present}, "trials"))
            earlier += _rows(read, past, "history")
            named |= {(key, number) for key, number in present | past if number}
        if digest not in sweeps and not any(trials):
            continue
        # `ringray run SPEC` knows it by its digest and gives it its name again.
        lost_row = SweepRow(digest, f"lost-{digest[:12]}", UNKNOWN, {}, "", {}, "interrupted", 0, 0)
        sweep = sweeps.get(digest, lost_row)
        # Current rows of all sources come before any history: the first one of a trial stays.
        for of_source in trials:
            store.restore(sweep, sweep.created, of_source)
        store.restore(sweep, sweep.created, (), earlier)
        saved_rows = {(row.trial.key, row.seq) for some in (*trials, earlier) for row in some}
        saved.append(_saved(store, sweep, sweep is lost_row, named, named - saved_rows))
    return tuple(saved)


def _saved(
    store: Store, sweep: SweepRow, nameless: bool, named: set[Recording], unread: set[Recording]
) -> Saved:
    """Returns the counts of a sweep; ``named``: the recordings of ended trials that its sources
    name."""
    trials, earlier = store.trials(sweep.digest), store.history(sweep.digest)
    ended = {row.key for row in trials if row.status is not None}
    lost = {key for key, _ in named} - ended
    others = sum(key not in lost for key, _ in unread)
    counts, gone = (len(trials), len(ended)), tuple(sorted(lost))
    return Saved(sweep.digest, sweep.name, *counts, gone, nameless, len(earlier), others)


def _sweeps(
    sources: list[sqlite3.Connection], environments: rows.Environments
) -> dict[str, SweepRow]:
    """Returns the sweeps by digest; the first source wins."""
    sweeps: dict[str, SweepRow] = {}
    for db in reversed(sources):
        for (digest,) in _scan(db, "digest FROM sweeps", "digest"):
            with suppress(sqlite3.Error, Damage):
                for sweep in rows.sweep_rows(db, environments, "WHERE digest = ?", digest):
                    sweeps[digest] = sweep
    return sweeps


def _listed(db: sqlite3.Connection, table: rows.Table) -> dict[str, set[Recording]]:
    """Returns the recordings by digest that a table, or its index, still names."""
    recordings = defaultdict[str, set[Recording]](set)
    for source, *order in _SCANS[table]:
        for digest, key, number in _scan(db, f"digest, key, seq FROM {source}", *order):
            if re.fullmatch(r"[0-9a-f]{64}", str(digest)):
                recordings[digest].add((str(key), int(number)))
    return recordings


def _rows(
    read: Callable[..., list[Kept]], places: Iterable[tuple[str | int, ...]], table: rows.Table
) -> list[Kept]:
    """Returns the rows of a table at ``places``, keys or keys and numbers, that ``read`` can
    read: ``rows.trial_rows`` of a sweep."""
    only = "AND key = ?" if table == "trials" else "AND key = ? AND seq = ?"
    readable: list[Kept] = []
    for place in sorted(places):
        with suppress(sqlite3.Error, Damage):
            readable += read(only, *place, table=table)
    return readable


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
