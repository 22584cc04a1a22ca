"""The store: the durable truth about sweeps and trials, one sqlite file.

One process at a time drives a sweep (:meth:`Store.lease`); any number may read while it writes.
Each method is one transaction: after a crash at any moment the file holds either all of what a
method does or nothing. Every fault of the place is a :class:`~ringray.base.errors.PlaceError` that
names the file and the way out.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ringray.base import private_files
from ringray.base.errors import PlaceError, UserError, suggestion
from ringray.lab.store import lease, snapshot
from ringray.lab.store.lease import Owner
from ringray.lab.store.rows import (
    BROKEN,
    NEXT_TURN,
    Damage,
    Environments,
    check_seals,
    forget_unplanned,
    put_environment,
    put_outcome,
    put_sweep,
    put_trials,
    record_pruned,
    restore_rows,
    seal,
    sweep_rows,
    trial_rows,
)
from ringray.lab.store.schema import check, connect, damaged, failures, transaction
from ringray.lab.trial.outcome import (
    STATUSES,
    SWEEP_STATUSES,
    Tracked,
)
from ringray.lab.trial.selection import selected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from ringray.lab.trial.outcome import (
        Kept,
        Outcome,
        SweepInfo,
        SweepRow,
        SweepStatus,
        TrialInfo,
        TrialRow,
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
    """``store.db`` under :func:`home`."""
    return private_files.create_home() / "store.db"


class Store:
    """An open store; close it, or use it as a context manager. Threads may share one.

    Args:
        path: the file; made with mode 0600 when it is absent and ``create`` is set.

    Raises:
        PlaceError: the file cannot be used: absent, a directory, unwritable, not a store,
            damaged, locked, of a newer schema, the disk full.
    """

    def __init__(self, path: str | Path, create: bool = True) -> None:
        self.path = Path(path).expanduser().absolute()
        had_log = self.path.with_name(f"{self.path.name}-wal").exists()
        self._db = connect(self.path, create)
        self._lock = threading.RLock()
        self._environments = Environments(self._db)
        self._leases: dict[str, Callable[[], bool]] = {}  # a driver's, by digest: still held?
        self._snapshot_due = time.monotonic() + _SNAPSHOT_S
        self.doubt = None if had_log else self._lost_log()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the store; the last process to do so moves the log of a killed one into it."""
        with self._lock:
            lease.bury(self.path)
            self._db.close()

    def check(self) -> None:
        """Reads the whole file for damage; DamagedStore if there is some."""
        with self._lock:
            check(self._db, self.path)

    # Writing

    def begin(self, sweep: SweepInfo, trials: Sequence[TrialInfo]) -> None:
        """Announces a sweep, new or known: status running, its trials known, pruned ones recorded.

        What has ended stays as recorded, with its environment. A trial that is no longer planned is
        forgotten unless it has ended; one that was pruned and no longer is, waits to be measured.
        """
        now = time.time()
        with self._write() as db:
            self._check_lease(sweep.digest)
            check_seals(db, sweep.digest)
            environment = put_environment(db, sweep.environment)
            put_sweep(db, sweep, environment, now)
            put_trials(db, sweep.digest, trials)
            forget_unplanned(db, sweep.digest, {trial.key for trial in trials})
            record_pruned(db, sweep, trials, environment, now)
            seal(db, sweep.digest)

    def record(self, digest: str, key: str, outcome: Outcome) -> None:
        """Records how a trial of a begun sweep ended, in place of what was recorded before.

        The attempts of an earlier measurement stay counted. Recording the same outcome twice is
        the same as once.

        Raises:
            PlaceError: also when this store held the sweep's lease and another driver took it.
            ValueError: an unknown status, or a trial that was never begun.
        """
        if outcome.status not in STATUSES:
            raise ValueError(f"status {outcome.status!r}: expected one of {', '.join(STATUSES)}")
        with self._write() as db:
            self._check_lease(digest)
            put_outcome(db, digest, key, outcome)
        if digest in self._leases and time.monotonic() > self._snapshot_due:
            self._take_snapshot()

    def finish(self, digest: str, status: SweepStatus) -> None:
        """Records how the sweep as a whole ended: complete, failed or interrupted."""
        if status not in SWEEP_STATUSES:
            raise ValueError(f"status {status!r}: expected one of {', '.join(SWEEP_STATUSES)}")
        with self._write() as db:
            self._check_lease(digest)
            db.execute(
                f"UPDATE sweeps SET status = ?, updated = ?, turn = {NEXT_TURN} WHERE digest = ?",
                (status, time.time(), digest),
            )
        self._take_snapshot()

    def forget(self, digest: str) -> None:
        """Removes a sweep and its trials: for one that was begun and then could not start."""
        with self._write() as db:
            self._check_lease(digest)
            db.execute("DELETE FROM trials WHERE digest = ?", (digest,))
            db.execute("DELETE FROM tracked WHERE digest = ?", (digest,))
            db.execute("DELETE FROM sweeps WHERE digest = ?", (digest,))

    def restore(self, sweep: SweepInfo, created: float, trials: Sequence[Kept]) -> int:
        """Adds what was kept elsewhere; what is here stays. Returns how many trials were added.

        A sweep that is new here has the status interrupted until it is begun.
        """
        with self._write() as db:
            return restore_rows(db, sweep, created, trials)

    def accepted(self, digest: str, place: Tracked) -> None:
        """Notes that MLflow has taken the sweep there."""
        with self._write() as db:
            db.execute("REPLACE INTO tracked VALUES (?, ?, ?, ?)", (digest, *place))

    @contextmanager
    def lease(
        self, digest: str, role: Role = "driver", note: Callable[[str], None] | None = None
    ) -> Iterator[None]:
        """Keeps every other process from driving (or tracking) this sweep at the same time.

        A driver's also reads the whole file for damage. ``note`` is told of a driver on another
        machine that left the sweep without its end.

        Raises:
            PlaceError: a live process holds it; names its pid and the way out.
            DamagedStore: the file is damaged.
        """
        if role == "driver":
            self.check()
        sweep = self.name_of(digest)

        def refusal(holder: Owner) -> str:
            return _REFUSALS[role].format(sweep=sweep, owner=holder)

        with lease.hold(self.path, digest, role, refusal, note) as held:
            if role == "driver":
                self._leases[digest] = held
                with self._read() as db:  # so that the file itself says that it is being written
                    db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            try:
                yield
            finally:
                if role == "driver":
                    self._leases.pop(digest, None)

    # Reading

    def owner(self, digest: str, role: Role = "driver") -> Owner | None:
        """Returns the live process that drives (or tracks) the sweep; ``str()`` is for users."""
        return lease.owner(self.path, digest, role)

    def sweeps(self) -> list[SweepRow]:
        """All sweeps, the one that was last begun or finished first."""
        return self._sweeps("ORDER BY turn DESC")

    def find(self, selector: str) -> SweepRow:
        """The newest sweep of that name, or the one whose digest begins so (4 digits or more).

        Raises:
            UserError: there is none, or a prefix fits several; says which there are.
        """
        with self._read() as db:
            known = db.execute("SELECT name, digest FROM sweeps ORDER BY turn DESC").fetchall()
        names = list(dict.fromkeys(name for name, _ in known))
        digests = selected(selector, known)[: 1 if selector in names else None]
        found = [row for digest in digests for row in self._sweeps("WHERE digest = ?", digest)]
        if len(found) == 1:
            return found[0]
        if found:
            several = ", ".join(f"{row.digest[:12]} ({row.name})" for row in found)
            raise UserError(f"sweep {selector!r} is not unique: {several}; give more digits")
        raise UserError(f"there is no sweep {selector!r} in {self.path}; {_known(names, selector)}")

    def knows(self, digest: str) -> bool:
        """Whether the sweep was ever begun here."""
        with self._read() as db:
            row = db.execute("SELECT 1 FROM sweeps WHERE digest = ?", (digest,)).fetchone()
        return row is not None

    def trials(self, digest: str) -> list[TrialRow]:
        """All trials of a sweep in the order of the plan."""
        return [row for row, _ in self._trials("ORDER BY idx, key", digest)]

    def changed_since(self, digest: str, cursor: int) -> tuple[list[TrialRow], int]:
        """The trials recorded after ``cursor`` (0 at first), oldest first, and the new cursor."""
        found = self._trials("AND seq > ? ORDER BY seq", digest, cursor)
        return [row for row, _ in found], found[-1][1] if found else cursor

    def tracked(self, digest: str) -> Tracked | None:
        """Where MLflow has taken the sweep before, or None."""
        with self._read() as db:
            row = db.execute(
                "SELECT uri, experiment_id, run_id FROM tracked WHERE digest = ?", (digest,)
            ).fetchone()
        return Tracked(*row) if row else None

    def sequence(self, digest: str, key: str | None = None) -> int:
        """The number of a trial's recording, or of the sweep's last; it grows with each."""
        query = "SELECT max(seq) FROM trials WHERE digest = ?"
        with self._read() as db:
            if key is None:
                row = db.execute(query, (digest,)).fetchone()
            else:
                row = db.execute(f"{query} AND key = ?", (digest, key)).fetchone()
        return int(row[0] or 0)

    def name_of(self, digest: str) -> str:
        """A sweep's name, or the start of its digest when it was never begun."""
        with self._read() as db:
            row = db.execute("SELECT name FROM sweeps WHERE digest = ?", (digest,)).fetchone()
        return str(row[0]) if row else digest[:12]

    # Inside

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._whole(), transaction(self._db, self.path) as db:
            yield db

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._whole(), failures(self.path):
            yield self._db

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except Damage as error:
            raise damaged(self.path, str(error)) from None

    def _lost_log(self) -> str | None:
        """Says so if a process died while it had the store open and its log is not there."""
        dead = lease.dead(self.path)
        with self._read() as db:
            logged = db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        if not dead or not logged:
            return None
        return (
            f"the store {self.path} lacks its log {self.path.name}-wal, though {dead[0]} died "
            "while it wrote: trials that it recorded last may be missing. `ringray resume SWEEP` "
            "measures them again, with --from-mlflow it takes them from there"
        )

    def _take_snapshot(self) -> None:
        began = time.monotonic()
        with self._lock:
            snapshot.take(self._db, self.path, BROKEN)
        now = time.monotonic()
        self._snapshot_due = now + max(_SNAPSHOT_S, (now - began) / _SNAPSHOT_SHARE)

    def _check_lease(self, digest: str) -> None:
        held = self._leases.get(digest)
        if held is not None and not held():
            raise PlaceError(
                f"sweep {self.name_of(digest)} was taken over by another driver while this one "
                "was out of reach; this one stops, the other goes on"
            )

    def _sweeps(self, condition: str, *values: str) -> list[SweepRow]:
        with self._read() as db:
            return sweep_rows(db, self._environments, condition, *values)

    def _trials(self, condition: str, digest: str, *values: int) -> list[Kept]:
        with self._read() as db:
            return trial_rows(db, self._environments, condition, digest, *values)


def _known(names: list[str], selector: str) -> str:
    if not names:
        return "the store is empty, `ringray run SPEC` fills it"
    if hint := suggestion(selector, names):
        return hint
    more = ", ..." if len(names) > 10 else ""
    return f"it knows {', '.join(names[:10])}{more}"
