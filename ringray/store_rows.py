"""The rows of the store's tables as the words of :mod:`ringray.records`, and back."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ringray.environment import point_digest
from ringray.records import STATUSES, SweepInfo, SweepRow, TrialInfo, TrialRow

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

# Decoded environments by id: thousands of trials share one, and rows refer to it.
EnvironmentCache = dict[str, dict[str, Any]]

_SWEEP_COLUMNS = "digest, name, kind, spec, source, environment, status, created, updated"
_TRIAL_COLUMNS = (
    "seq, key, idx, config, predicted, status, reason, metrics, samples, point, attempts, "
    "started, ended, environment"
)


def sweep_rows(
    db: sqlite3.Connection, cache: EnvironmentCache, condition: str, *values: str
) -> list[SweepRow]:
    """The sweeps that fit ``condition`` (the end of an SQL statement, never a user's text)."""
    rows = db.execute(f"SELECT {_SWEEP_COLUMNS} FROM sweeps {condition}", values).fetchall()
    found = []
    for digest, name, kind, spec, source, environment, status, created, updated in rows:
        by_status = dict(
            db.execute(
                "SELECT status, count(*) FROM trials WHERE digest = ? GROUP BY status", (digest,)
            ).fetchall()
        )
        found.append(
            SweepRow(
                digest=digest,
                name=name,
                kind=kind,
                spec=json.loads(spec),
                source=source,
                environment=_environment(db, cache, environment),
                status=status,
                created=created,
                updated=updated,
                total=sum(by_status.values()),
                counts={status: by_status[status] for status in STATUSES if status in by_status},
            )
        )
    return found


def trial_rows(
    db: sqlite3.Connection, cache: EnvironmentCache, condition: str, digest: str, *values: int
) -> list[tuple[TrialRow, int]]:
    """The sweep's trials that fit ``condition`` (as above), each with its sequence number."""
    rows = db.execute(
        f"SELECT {_TRIAL_COLUMNS} FROM trials WHERE digest = ? {condition}", (digest, *values)
    ).fetchall()
    found = []
    for seq, key, index, config, predicted, status, reason, metrics, samples, *rest in rows:
        point, attempts, started, ended, environment = rest
        row = TrialRow(
            key=key,
            index=index,
            config=json.loads(config),
            predicted=json.loads(predicted),
            status=status,
            reason=reason,
            metrics=json.loads(metrics),
            samples=json.loads(samples),
            point=point,
            attempts=attempts,
            started=started,
            ended=ended,
            environment=None if environment is None else _environment(db, cache, environment),
        )
        found.append((row, seq))
    return found


def put_environment(db: sqlite3.Connection, environment: dict[str, Any]) -> str:
    """Keeps an environment once, whoever ran in it; returns its id."""
    content = json.dumps(environment, sort_keys=True)
    identity = sha256(content.encode()).hexdigest()
    db.execute("INSERT OR IGNORE INTO environments VALUES (?, ?)", (identity, content))
    return identity


def next_seq(db: sqlite3.Connection, digest: str) -> int:
    """The write lock is held, so no reader can have seen a later number than is committed."""
    row = db.execute("SELECT max(seq) FROM trials WHERE digest = ?", (digest,)).fetchone()
    return int(row[0] or 0) + 1


def forget_unplanned(db: sqlite3.Connection, digest: str, planned: set[str]) -> None:
    """Drops the trials that have not ended and are in the plan no more."""
    waiting = db.execute(
        "SELECT key FROM trials WHERE digest = ? AND status IS NULL", (digest,)
    ).fetchall()
    db.executemany(
        "DELETE FROM trials WHERE digest = ? AND key = ?",
        [(digest, key) for (key,) in waiting if key not in planned],
    )


def record_pruned(
    db: sqlite3.Connection,
    sweep: SweepInfo,
    trials: Sequence[TrialInfo],
    environment: str,
    now: float,
) -> None:
    """Records what the plan prunes, and frees what it prunes no longer; measured trials stay."""
    known: dict[str, tuple[str | None, str | None]] = {
        key: (status, reason)
        for key, status, reason in db.execute(
            "SELECT key, status, reason FROM trials WHERE digest = ?", (sweep.digest,)
        )
    }
    seq = next_seq(db, sweep.digest)
    pruned, revived = [], []
    for trial in trials:
        status, reason = known[trial.key]
        place = (sweep.digest, trial.key)
        if trial.pruned is None:
            if status == "pruned":
                revived.append(place)
        elif status is None or (status == "pruned" and reason != trial.pruned):
            point = point_digest({"kind": sweep.kind, **trial.config}, sweep.environment)
            pruned.append((seq, trial.pruned, point, now, now, environment, *place))
            seq += 1
    db.executemany(
        "UPDATE trials SET seq = ?, status = 'pruned', reason = ?, point = ?, started = ?, "
        "ended = ?, environment = ? WHERE digest = ? AND key = ?",
        pruned,
    )
    db.executemany(
        "UPDATE trials SET seq = 0, status = NULL, reason = NULL, point = NULL, "
        "started = NULL, ended = NULL, environment = NULL WHERE digest = ? AND key = ?",
        revived,
    )


def packed(value: Any) -> str:
    """Compact JSON in the given order of keys: a config is shown as it was planned."""
    return json.dumps(value, separators=(",", ":"))


def _environment(db: sqlite3.Connection, cache: EnvironmentCache, identity: str) -> dict[str, Any]:
    if identity not in cache:
        (content,) = db.execute(
            "SELECT content FROM environments WHERE id = ?", (identity,)
        ).fetchone()
        cache[identity] = json.loads(content)
    return cache[identity]
