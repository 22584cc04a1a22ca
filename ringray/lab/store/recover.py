"""``ringray recover``: a new store from a damaged one, its snapshot and its log.

Rows are read one by one through sqlite, by the keys that the table or its index still lists, and
are taken if their checksums hold. The snapshot supplies what is not readable any more.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ringray.base import leftovers
from ringray.base.errors import DamagedStore, PlaceError, reason_of
from ringray.lab.store import lease, rows, snapshot
from ringray.lab.store.memory_copy import unchanged
from ringray.lab.store.schema import Damage, connect, resolved
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import UNKNOWN, Kept, SweepRow

_PAGE = 4096  # bytes; sqlite's default, which every store has
_SIZE = slice(28, 32)  # where the first page says how many there are; sqlite looks itself at 0


@dataclass(frozen=True)
class Saved:
    """One sweep: numbers of saved and ended trials and of earlier measurements. ``lost``: keys of
    ended trials that cannot be read; ``lost_others``: number of lost measurements of other trials;
    ``nameless``: the sweep's own row is lost."""

    digest: str
    name: str
    trials: int
    ended: int
    lost: tuple[str, ...]
    nameless: bool
    earlier: int
    lost_others: int


@dataclass(frozen=True)
class Recovered:
    """The result. ``kept``: the new path of the damaged file; None if the store was not damaged."""

    kept: Path | None
    sweeps: tuple[Saved, ...]


def recover(path: Path) -> Recovered:
    """Replaces a damaged store by a new one with everything that can be read.

    Raises:
        PlaceError: there is no file, nothing in it can be read, a live process uses it, or the
            new one cannot be written; the store is then as it was.
    """
    path = resolved(path)
    for user in lease.users(path):
        raise PlaceError(f"the store {path} is used by {user}; end that process first")
    if _whole(path):
        return Recovered(None, ())
    try:
        with leftovers.folder(".recovering", path.parent) as folder:
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
        for one in sources:
            with suppress(PlaceError):
                opened.append(stack.enter_context(closing(_open(one, new))))
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
        for (found,) in _scan(db, "id FROM identity", "id"):
            if re.fullmatch(r"[0-9a-f]{32}", str(found)):
                store.identify(found)
                return


def _fill(store: Store, sources: list[sqlite3.Connection]) -> tuple[Saved, ...]:
    """Writes the rows of all sources, those of the first one before the others'; the sweeps that
    were created last come last."""
    environments = cache(partial(_environment, sources))
    keys = [_keys(db) for db in sources]
    past = [_past(db) for db in sources]
    sweeps = _sweeps(sources, environments)
    digests = sorted(sweeps, key=lambda digest: sweeps[digest].created)
    digests += sorted({digest for one in keys for digest in one} - set(digests))
    saved = []
    for digest in digests:
        found = [
            _trials(db, environments, digest, ((key,) for key in known.get(digest, {})))
            for db, known in zip(sources, keys, strict=True)
        ]
        earlier = [
            one
            for db, known in zip(sources, past, strict=True)
            for one in _trials(db, environments, digest, sorted(known.get(digest, ())), "history")
        ]
        if digest not in sweeps and not any(found):
            continue
        # `ringray run SPEC` knows it by its digest and gives it its name again.
        lost_row = SweepRow(digest, f"lost-{digest[:12]}", UNKNOWN, {}, "", {}, "interrupted", 0, 0)
        sweep = sweeps.get(digest, lost_row)
        for one in found:
            store.restore(sweep, sweep.created, one)
        store.restore(sweep, sweep.created, (), earlier)
        listed = {at for one in keys for at in one.get(digest, {}).items() if at[1]}
        listed |= {at for one in past for at in one.get(digest, ())}
        read = {(one.trial.key, one.seq) for part in (*found, earlier) for one in part}
        saved.append(_saved(store, sweep, sweep is lost_row, listed, listed - read))
    return tuple(saved)


def _saved(
    store: Store, sweep: SweepRow, nameless: bool,
    listed: set[tuple[str, int]], unread: set[tuple[str, int]],
) -> Saved:  # fmt: skip
    """Returns the counts of a sweep; ``listed`` and ``unread``: keys and numbers of recordings."""
    trials, earlier = store.trials(sweep.digest), store.history(sweep.digest)
    ended = {row.key for row in trials if row.status is not None}
    lost = {key for key, _ in listed} - ended
    others = sum(key not in lost for key, _ in unread)
    return Saved(
        sweep.digest, sweep.name, len(trials), len(ended), tuple(sorted(lost)), nameless,
        len(earlier), others,
    )  # fmt: skip


def _sweeps(
    sources: list[sqlite3.Connection], environments: rows.Environments
) -> dict[str, SweepRow]:
    """Returns the sweeps by digest; the first source wins."""
    found: dict[str, SweepRow] = {}
    for db in reversed(sources):
        for (digest,) in _scan(db, "digest FROM sweeps", "digest"):
            with suppress(sqlite3.Error, Damage):
                for one in rows.sweep_rows(db, environments, "WHERE digest = ?", digest):
                    found[digest] = one
    return found


def _keys(db: sqlite3.Connection) -> dict[str, dict[str, int]]:
    """Returns the keys of trials by digest, each with its number, which is above 0 once ended."""
    found: dict[str, dict[str, int]] = {}
    for digest, key, seq in (
        *_scan(db, "digest, key, seq FROM trials NOT INDEXED", "digest", "key"),
        *_scan(db, "digest, key, seq FROM trials INDEXED BY trials_by_seq", "digest", "seq"),
    ):
        if re.fullmatch(r"[0-9a-f]{64}", str(digest)):
            keys = found.setdefault(digest, {})
            keys[str(key)] = max(keys.get(str(key), 0), int(seq))
    return found


def _past(db: sqlite3.Connection) -> dict[str, set[tuple[str, int]]]:
    """Returns the keys and numbers of earlier recordings by digest."""
    found: dict[str, set[tuple[str, int]]] = {}
    for digest, key, seq in _scan(db, "digest, key, seq FROM history", "digest", "key", "seq"):
        if re.fullmatch(r"[0-9a-f]{64}", str(digest)):
            found.setdefault(digest, set()).add((str(key), int(seq)))
    return found


def _trials(
    db: sqlite3.Connection, environments: rows.Environments, digest: str,
    places: Iterable[tuple[str | int, ...]], table: rows.Table = "trials",
) -> list[Kept]:  # fmt: skip
    only = "AND key = ?" if table == "trials" else "AND key = ? AND seq = ?"
    found: list[Kept] = []
    for place in places:
        with suppress(sqlite3.Error, Damage):
            found += rows.trial_rows(db, environments, only, digest, *place, table=table)
    return found


def _scan(db: sqlite3.Connection, what: str, *order: str) -> Iterator[tuple[Any, ...]]:
    """Yields rows from both ends of a table or an index up to a destroyed page."""
    for direction in ("ASC", "DESC"):
        by = ", ".join(f"{column} {direction}" for column in order)
        with suppress(sqlite3.Error):
            yield from db.execute(f"SELECT {what} ORDER BY {by}")


def _exchange(path: Path, new: Path) -> Path:
    """Puts ``new`` in the place of ``path``; returns the name under which the old file is kept."""
    kept = path.with_name(f"{path.name}.damaged")
    number = 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.damaged-{number}")
    for ending in ("", "-wal"):
        if (one := Path(f"{path}{ending}")).exists():
            try:
                os.link(one, f"{kept}{ending}")
            except OSError:  # a file system without links
                shutil.copy2(one, f"{kept}{ending}")
    # sqlite would take a log of the old file beside the new one for the new one's.
    for ending in ("-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    new.replace(path)
    return kept
