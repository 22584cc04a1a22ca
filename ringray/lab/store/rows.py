"""The rows of the store's tables as the words of :mod:`ringray.lab.trial.outcome`, and back."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from ringray.base.provenance import point_digest
from ringray.lab.store.schema import SWEEP_SEAL, TRIAL_SEAL, seal_of
from ringray.lab.trial.outcome import (
    STATUSES,
    UNKNOWN,
    Kept,
    Outcome,
    SweepInfo,
    SweepRow,
    TrialInfo,
    TrialRow,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence


class Damage(ValueError):
    """A row is not as it was written; says which."""


# Decoded environments by id: thousands of trials share one, and rows refer to it.
EnvironmentCache = dict[str, dict[str, Any]]

NEXT_TURN = "(SELECT max(turn) + 1 FROM sweeps)"
_SWEEP_COLUMNS = "digest, name, kind, spec, source, environment, status, created, updated"
_TRIAL_COLUMNS = (
    "seq, key, idx, config, predicted, status, reason, metrics, samples, point, attempts, "
    "started, ended, environment"
)


def sweep_rows(
    db: sqlite3.Connection, cache: EnvironmentCache, condition: str, *values: str
) -> list[SweepRow]:
    """The sweeps that fit ``condition`` (the end of an SQL statement, never a user's text)."""
    rows = db.execute(
        f"SELECT {_SWEEP_COLUMNS}, seal IS {SWEEP_SEAL} FROM sweeps {condition}", values
    ).fetchall()
    found = []
    for digest, name, kind, spec, source, environment, status, created, updated, whole in rows:
        if not whole:
            raise Damage(f"sweep {name} ({digest[:12]}) is not as it was written")
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
                spec=_parsed(spec, f"the spec of sweep {name}"),
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
        f"SELECT {_TRIAL_COLUMNS}, seal IS {TRIAL_SEAL} FROM trials WHERE digest = ? {condition}",
        (digest, *values),
    ).fetchall()
    found = []
    for seq, key, index, config, predicted, status, reason, metrics, samples, *rest in rows:
        point, attempts, started, ended, environment, whole = rest
        named = f"trial {key} of sweep {digest[:12]}"
        if not whole:
            raise Damage(f"{named} is not as it was written")
        row = TrialRow(
            key=key,
            index=index,
            config=_parsed(config, named),
            predicted=_parsed(predicted, named),
            status=status,
            reason=reason,
            metrics=_parsed(metrics, named),
            samples=_parsed(samples, named),
            point=point,
            attempts=attempts,
            started=started,
            ended=ended,
            environment=None if environment is None else _environment(db, cache, environment),
        )
        found.append((row, seq))
    return found


def check_seals(db: sqlite3.Connection, digest: str, key: str | None = None) -> None:
    """Raises Damage when a trial of the sweep (or the one of that key) was changed from outside."""
    only, values = ("", ()) if key is None else (" AND key = ?", (key,))
    row = db.execute(
        f"SELECT key FROM trials WHERE digest = ?{only} AND seal IS NOT {TRIAL_SEAL}",
        (digest, *values),
    ).fetchone()
    if row:
        raise Damage(f"trial {row[0]} of sweep {digest[:12]} is not as it was written")


def seal(db: sqlite3.Connection, digest: str) -> None:
    """Seals what was written to the trials of a sweep; after check_seals."""
    db.execute(
        f"UPDATE trials SET seal = {TRIAL_SEAL} WHERE digest = ? AND seal IS NOT {TRIAL_SEAL}",
        (digest,),
    )


def put_sweep(db: sqlite3.Connection, sweep: SweepInfo, environment: str, now: float) -> None:
    """Writes a sweep that begins, new or known: status running, the latest of all."""
    values = (sweep.name, sweep.kind, packed(sweep.spec), sweep.source, environment, now)
    db.execute(
        "INSERT INTO sweeps (digest, name, kind, spec, source, environment, status, "
        "created, updated) VALUES (?, ?, ?, ?, ?, ?, 'running', ?, ?) "
        "ON CONFLICT (digest) DO UPDATE SET name = excluded.name, kind = excluded.kind, "
        "spec = excluded.spec, source = excluded.source, status = 'running', "
        "environment = excluded.environment, updated = excluded.updated",
        (sweep.digest, *values, now),
    )
    db.execute(
        f"UPDATE sweeps SET turn = {NEXT_TURN}, seal = {SWEEP_SEAL} WHERE digest = ?",
        (sweep.digest,),
    )


def put_trials(db: sqlite3.Connection, digest: str, trials: Sequence[TrialInfo]) -> None:
    """Writes what is planned; how a trial ended is kept."""
    db.executemany(
        "INSERT INTO trials (digest, key, idx, config, predicted) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (digest, key) DO UPDATE SET idx = excluded.idx, "
        "config = excluded.config, predicted = excluded.predicted "
        "WHERE idx <> excluded.idx OR config <> excluded.config "
        "OR predicted <> excluded.predicted",
        [
            (digest, trial.key, trial.index, packed(trial.config), packed(trial.predicted))
            for trial in trials
        ],
    )


def put_outcome(db: sqlite3.Connection, digest: str, key: str, outcome: Outcome) -> None:
    """Writes how a trial ended; ValueError if it was never begun."""
    row = db.execute(
        "SELECT idx, config, predicted, attempts, started, ended FROM trials "
        "WHERE digest = ? AND key = ?",
        (digest, key),
    ).fetchone()
    if row is None:
        raise ValueError(f"trial {key} of sweep {digest[:12]} was not begun")
    check_seals(db, digest, key)
    index, config, predicted, attempts, *before = row
    ours = [float(outcome.started), float(outcome.ended)]
    if before != ours:
        attempts += outcome.attempts
    if outcome.environment is None:
        (environment,) = db.execute(
            "SELECT environment FROM sweeps WHERE digest = ?", (digest,)
        ).fetchone()
    else:
        environment = put_environment(db, outcome.environment)
    values = (
        next_seq(db, digest), outcome.status, outcome.reason, packed(dict(outcome.metrics)),
        packed(dict(outcome.samples)), outcome.point, attempts, *ours, environment,
    )  # fmt: skip
    # Sealed here and not afterwards: a row that is written twice takes twice the room.
    db.execute(
        "UPDATE trials SET seq = ?, status = ?, reason = ?, metrics = ?, samples = ?, "
        "point = ?, attempts = ?, started = ?, ended = ?, environment = ?, seal = ? "
        "WHERE digest = ? AND key = ?",
        (*values, seal_of(digest, key, index, config, predicted, *values), digest, key),
    )


def restore_rows(
    db: sqlite3.Connection, sweep: SweepInfo, created: float, trials: Sequence[Kept]
) -> int:
    """Adds a sweep and trials that were kept elsewhere, and none that is here; how many trials."""
    check_seals(db, sweep.digest)
    environment = put_environment(db, sweep.environment)
    db.execute(
        "INSERT INTO sweeps (digest, name, kind, spec, source, environment, status, "
        "created, updated) VALUES (?, ?, ?, ?, ?, ?, 'interrupted', ?, ?) "
        "ON CONFLICT (digest) DO UPDATE SET name = excluded.name, kind = excluded.kind, "
        "spec = excluded.spec, source = excluded.source, environment = excluded.environment, "
        f"created = excluded.created, seal = NULL WHERE kind = '{UNKNOWN}'",
        (sweep.digest, sweep.name, sweep.kind, packed(sweep.spec), sweep.source, environment,
         created, created),
    )  # fmt: skip
    db.execute(
        f"UPDATE sweeps SET turn = {NEXT_TURN}, seal = {SWEEP_SEAL} "
        "WHERE digest = ? AND seal IS NULL",
        (sweep.digest,),
    )
    added = 0
    for trial, seq in trials:
        where = None if trial.environment is None else put_environment(db, trial.environment)
        added += db.execute(
            "INSERT INTO trials (digest, key, idx, config, predicted, seq, status, reason, "
            "metrics, samples, point, attempts, started, ended, environment) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (digest, key) DO UPDATE SET seq = excluded.seq, "
            "status = excluded.status, reason = excluded.reason, metrics = excluded.metrics, "
            "samples = excluded.samples, point = excluded.point, attempts = excluded.attempts, "
            "started = excluded.started, ended = excluded.ended, "
            "environment = excluded.environment WHERE status IS NULL",
            (sweep.digest, trial.key, trial.index, packed(trial.config), packed(trial.predicted),
             seq, trial.status, trial.reason, packed(trial.metrics), packed(trial.samples),
             trial.point, trial.attempts, trial.started, trial.ended, where),
        ).rowcount  # fmt: skip
    seal(db, sweep.digest)
    return added


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


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError):  # of an older schema, whose rows had no seals
        raise Damage(f"{what} cannot be read") from None


def _environment(db: sqlite3.Connection, cache: EnvironmentCache, identity: str) -> dict[str, Any]:
    if identity not in cache:
        row = db.execute("SELECT content FROM environments WHERE id = ?", (identity,)).fetchone()
        if row is None or sha256(row[0].encode()).hexdigest() != identity:
            raise Damage(f"environment {identity[:12]} is not as it was written")
        cache[identity] = json.loads(row[0])
    return cache[identity]
