"""The store: the durable record of sweeps and trials, one sqlite file.

One process at a time drives a sweep (:meth:`Store.lease`); any number may read meanwhile. Each
method is one transaction: a crash at any moment leaves either all of it in the file or nothing.
Errors of the file are a :class:`~ringray.base.errors.PlaceError` that names it and the way out.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from ringray.base import locks, private_files
from ringray.base.errors import PlaceError, UserError, suggestion
from ringray.base.locks import Owner
from ringray.lab.store import rows, snapshot
from ringray.lab.store.memory_copy import MemoryCopy
from ringray.lab.store.schema import connect, damaged, failures, resolved, transaction
from ringray.lab.trial.outcome import (
    STATUSES,
    SWEEP_STATUSES,
    Kept,
    Outcome,
    SweepInfo,
    SweepRow,
    SweepStatus,
    Tracked,
    TrialInfo,
    TrialRow,
    selected,
)

Role = Literal["driver", "tracker"]
_SNAPSHOT_S = 30.0  # seconds between two snapshots while a driver records, at least
_SNAPSHOT_SHARE = 0.01  # of a driver's time for snapshots, at most

_REFUSALS = {
    "driver": "sweep {sweep} is being run by {owner}; wait for it or end that process, then "
    "`ringray resume {sweep}` continues",
    "tracker": "sweep {sweep} is being written to MLflow by {owner}; it ends by itself, "
    "`ringray sync {sweep}` can be called again afterwards",
}


def default_path() -> Path:
    """Returns ``store.db`` in the home folder."""
    home = private_files.home()
    if os.path.lexists(home) and not home.is_dir():
        private_files.create_home()  # which says why it cannot be used
    return home / "store.db"


class Store:
    """An open store; close it, or use it as a context manager. Threads may share one.

    Args:
        path: the file; created with mode 0600 if it is absent and ``create`` is set.
        readonly: reads a copy in memory, which follows the file; changes nothing, neither the file
            nor its schema nor what lies beside it.

    Raises:
        PlaceError: the file cannot be used: absent, a directory, unwritable, not a store,
            damaged, locked, of a newer schema, the disk full; if ``readonly``, by another user.
    """

    def __init__(self, path: str | Path, create: bool = True, readonly: bool = False) -> None:
        self.path = resolved(path)
        self._copy = MemoryCopy(self.path) if readonly else None
        self._db = self._copy.db if self._copy else connect(self.path, create)
        self._file = self.path.stat()
        self._lost: PlaceError | None = None
        self._lock = threading.RLock()
        # Thousands of trials share one.
        self._environments = cache(partial(rows.environment, self._db))
        self._leases: dict[str, Callable[[], bool]] = {}  # a driver's, by digest: still held?
        self._snapshot_due = time.monotonic() + _SNAPSHOT_S

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the store; the last process to do so moves the log of a killed one into it."""
        with self._lock:
            self._db.close()

    def check(self) -> None:
        """Reads the whole file (about 5 ms for 1,000 trials); DamagedStore if it is damaged."""
        with self._read() as db:
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise damaged(self.path, str(verdict).replace("\n", " "))

    # Writing

    def begin(
        self,
        sweep: SweepInfo,
        trials: Sequence[TrialInfo],
        current: Mapping[str, int] | None = None,
    ) -> None:
        """Begins a sweep, new or known: writes its status running, its trials and the pruned ones.

        Ended trials stay as recorded, with their environment. A trial that is no longer planned is
        removed unless it has ended; one that is no longer pruned is to be measured.

        Args:
            current: numbers of earlier recordings that become the current ones, by trial key.
        """
        now = time.time()
        with self._write(sweep.digest) as db:
            environment = rows.put_sweep(db, sweep, "running", now, "status", "updated")
            for key, seq in (current or {}).items():
                rows.make_current(db, sweep.digest, key, seq)
            rows.put_trials(db, sweep, trials, environment, now)

    def record(self, digest: str, key: str, outcome: Outcome) -> None:
        """Records the outcome of a trial as the current one; an earlier one goes to the history.

        Attempts of the earlier measurement stay counted. Recording the same outcome twice equals
        recording it once.

        Raises:
            PlaceError: also if this store held the sweep's lease and another driver took it.
            ValueError: an unknown status, or a trial that was never begun.
        """
        if outcome.status not in STATUSES:
            raise ValueError(f"status {outcome.status!r}: expected one of {', '.join(STATUSES)}")
        with self._write(digest) as db:
            rows.put_outcome(db, digest, key, outcome)
        if digest in self._leases and time.monotonic() > self._snapshot_due:
            self._take_snapshot()

    def finish(self, digest: str, status: SweepStatus) -> None:
        """Records the end of the sweep: complete, failed or interrupted."""
        if status not in SWEEP_STATUSES:
            raise ValueError(f"status {status!r}: expected one of {', '.join(SWEEP_STATUSES)}")
        with self._write(digest) as db:
            update = f"UPDATE sweeps SET status = ?, updated = ?, turn = {rows.NEXT_TURN}"
            db.execute(f"{update} WHERE digest = ?", (status, time.time(), digest))
        self._take_snapshot()

    def forget(self, digest: str) -> None:
        """Removes a sweep and its trials, if it was begun and then could not start."""
        with self._write(digest) as db:
            for table in ("trials", "tracked", "sweeps"):
                db.execute(f"DELETE FROM {table} WHERE digest = ?", (digest,))

    def restore(
        self, sweep: SweepInfo, created: float, trials: Sequence[Kept], earlier: Sequence[Kept] = ()
    ) -> tuple[int, int]:
        """Adds trials and earlier recordings from elsewhere that are missing here; returns the
        number of each. The measurement that a trial has here stays current.

        A sweep that is new here has the status interrupted until it is begun.
        """
        with self._write(sweep.digest) as db:
            return rows.restore_rows(db, sweep, created, trials, earlier)

    def identify(self, identity: str) -> None:
        """Makes this store the continuation of one that is lost."""
        with self._lock, transaction(self._db, self.path) as db:
            db.execute("UPDATE identity SET id = ?", (identity,))

    def accepted(self, digest: str, place: Tracked) -> None:
        """Records the place at which MLflow accepted the sweep."""
        with self._write(digest) as db:
            db.execute("REPLACE INTO tracked VALUES (?, ?, ?, ?)", (digest, *place))

    @contextmanager
    def lease(
        self, digest: str, role: Role = "driver", note: Callable[[str], None] | None = None
    ) -> Iterator[None]:
        """Holds the right to drive (or track) this sweep, which one process has at a time.

        For a driver it also checks the whole file. ``note`` is told of a driver on another machine
        that left the sweep without its end.

        Raises:
            PlaceError: a live process holds it; the message names its pid and the way out.
            DamagedStore: the file is damaged.
        """
        if role == "driver":
            self.check()
        refusal = partial(_REFUSALS[role].format, sweep=self.name_of(digest))
        with locks.hold(locks.lease_path(self.path, digest, role), refusal, note) as held:
            if role == "tracker":
                yield
                return
            self._leases[digest] = held
            self._one("PRAGMA wal_checkpoint(PASSIVE)")  # the file itself says that it is in use
            try:
                yield
            finally:
                self._leases.pop(digest, None)

    # Reading

    @property
    def identity(self) -> str:
        """A name of this store, in hex digits, that no other has; `recover` keeps it."""
        if row := self._one("SELECT id FROM identity"):
            return str(row[0])
        raise damaged(self.path, "its identity is gone")

    def owner(self, digest: str, role: Role = "driver") -> Owner | None:
        """Returns the live process that drives (or tracks) the sweep; ``str()`` is for users."""
        return locks.owner(locks.lease_path(self.path, digest, role))

    def sweeps(self) -> list[SweepRow]:
        """Returns all sweeps, the last one begun or finished first."""
        return self._sweeps("ORDER BY turn DESC")

    def find(self, selector: str) -> SweepRow:
        """Returns the newest sweep of that name, or the one by the first 4 or more digits.

        Raises:
            UserError: there is none, or several fit; the message lists them.
        """
        with self._read() as db:
            sweeps = db.execute("SELECT name, digest FROM sweeps ORDER BY turn DESC").fetchall()
        names = list(dict.fromkeys(name for name, _ in sweeps))
        digests = selected(selector, sweeps)[: 1 if selector in names else None]
        matches = [row for digest in digests for row in self._sweeps("WHERE digest = ?", digest)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            several = ", ".join(f"{row.digest[:12]} ({row.name})" for row in matches)
            raise UserError(f"sweep {selector!r} is not unique: {several}; give more digits")
        raise UserError(f"there is no sweep {selector!r} in {self.path}; {_known(names, selector)}")

    def knows(self, digest: str) -> bool:
        """Returns whether the sweep was ever begun here."""
        return self._one("SELECT 1 FROM sweeps WHERE digest = ?", digest) is not None

    def trials(self, digest: str) -> list[TrialRow]:
        """Returns all trials of a sweep in the order of the plan."""
        return [row for row, _ in self._trials("AND current ORDER BY idx, key", digest)]

    def newest(self, digest: str, count: int) -> list[TrialRow]:
        """Returns the successful trials of a sweep that ended last."""
        condition = "AND current AND status = 'ok' ORDER BY ended DESC LIMIT ?"
        return [row for row, _ in self._trials(condition, digest, count)]

    def history(self, digest: str) -> list[Kept]:
        """Returns the earlier recordings of all trials, which :meth:`trials` does not, in the order
        of recording."""
        return self._trials("AND NOT current ORDER BY seq, key", digest)

    def changed_since(self, digest: str, cursor: int) -> tuple[list[Kept], int]:
        """Returns all recordings after ``cursor`` (0 at first), the earlier ones of a trial
        included, in their order, and the new cursor."""
        changes = self._trials("AND seq > ? ORDER BY seq", digest, cursor)
        return changes, changes[-1].seq if changes else cursor

    def tracked(self, digest: str) -> Tracked | None:
        """Returns the place at which MLflow accepted the sweep before, or None."""
        query = "SELECT uri, experiment_id, run_id FROM tracked WHERE digest = ?"
        row = self._one(query, digest)
        return Tracked(*row) if row else None

    def sequence(self, digest: str, key: str | None = None) -> int:
        """Returns the number of a trial's record, or of the sweep's last; it grows with each."""
        which = "digest = ? AND key = ifnull(?, key) AND current"
        row = self._one(
            f"SELECT seq FROM trials WHERE {which} ORDER BY seq DESC LIMIT 1", digest, key
        )
        return int(row[0]) if row else 0

    def name_of(self, digest: str) -> str:
        """Returns a sweep's name, or the start of its digest if it was never begun."""
        row = self._one("SELECT name FROM sweeps WHERE digest = ?", digest)
        return str(row[0]) if row else digest[:12]

    # Inside

    @contextmanager
    def _write(self, digest: str) -> Iterator[sqlite3.Connection]:
        """Opens a transaction on a sweep; PlaceError if another driver took this one's lease, or if
        the file was deleted or replaced."""
        with self._lock:
            self._check_place()
        with self._lock, transaction(self._db, self.path) as db:
            held = self._leases.get(digest)
            if held is not None and not held():
                raise PlaceError(
                    f"sweep {self.name_of(digest)} was taken over by another driver while this one "
                    "was out of reach; this one stops, the other goes on"
                )
            yield db

    def _check_place(self) -> None:
        """Raises PlaceError if the file was deleted or replaced, which sqlite tolerates; the
        content is then saved beside the path, and the error says where."""
        try:
            if os.path.samestat(self.path.stat(), self._file):
                return
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:  # a network that is away; sqlite reports it
            return
        if self._lost is None:
            how = "replaced" if self.path.exists() else "deleted"
            copy = self.path.with_name(f"{self.path.name}.rescued-{int(time.time())}")
            where = (
                f"all that it held is in {copy}: `ringray resume SWEEP --store {copy}` continues"
            )
            try:
                private_files.above(copy)
                snapshot.copy(self._db, copy)
            except (OSError, sqlite3.Error):
                where = "what it held could not be saved; `ringray resume SWEEP --from-mlflow` "
                where += "restores what MLflow has"
            why = f"was {how} while it is in use; {where}"
            self._lost = PlaceError(f"the store {self.path} {why}")
        raise self._lost

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._lock, failures(self.path):
            if self._copy is not None:
                self._copy.refresh()
            yield self._db

    def _one(self, query: str, *values: str | None) -> tuple[Any, ...] | None:
        with self._read() as db:
            row: tuple[Any, ...] | None = db.execute(query, values).fetchone()
        return row

    def _take_snapshot(self) -> None:
        began = time.monotonic()
        with self._lock:
            snapshot.take(self._db, self.path)
        now = time.monotonic()
        self._snapshot_due = now + max(_SNAPSHOT_S, (now - began) / _SNAPSHOT_SHARE)

    def _sweeps(self, condition: str, *values: str) -> list[SweepRow]:
        with self._read() as db:
            sweeps = rows.sweep_rows(db, self._environments, condition, *values)
            return [rows.counted(db, sweep) for sweep in sweeps]

    def _trials(self, condition: str, digest: str, *values: int) -> list[Kept]:
        with self._read() as db:
            return rows.trial_rows(db, self._environments, digest, condition, *values)


def _known(names: list[str], selector: str) -> str:
    if not names:
        return "the store is empty, `ringray run SPEC` fills it"
    if hint := suggestion(selector, names):
        return hint
    rest = ", ..." if len(names) > 10 else ""
    return f"it knows {', '.join(names[:10])}{rest}"
