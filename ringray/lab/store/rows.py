"""Rows of the store's tables as the classes of :mod:`ringray.lab.trial.outcome`, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from sqlite3 import Connection
from typing import Any, Literal, get_args

from ringray.base.provenance import point_digest
from ringray.lab.store.schema import SWEEP, SWEEP_SEAL, TRIAL, TRIAL_SEAL, Damage, seal_of
from ringray.lab.store.value_types import is_sweep, is_trial
from ringray.lab.trial.outcome import (
    NOT_REQUESTED,
    STATUSES,
    UNKNOWN,
    Kept,
    Outcome,
    SweepInfo,
    SweepRow,
    SweepStatus,
    TrialInfo,
    TrialRow,
)

Table = Literal["trials", "history"]
Environments = Callable[[str], dict[str, Any]]  # returns the decoded environment of that id
NEXT_TURN = "(SELECT max(turn) + 1 FROM sweeps)"
_PLAN = TRIAL[2:5]
_OUTCOME = TRIAL[5:]  # columns that are empty until a trial has ended
_RECORDING = ("key", "status", "point", "started", "ended")  # tell a recording from any other
TABLES: tuple[Table, ...] = get_args(Table)  # with recordings: the current ones, the earlier ones
BROKEN = [f"SELECT key FROM {table} WHERE seal IS NOT {TRIAL_SEAL}" for table in TABLES]


def sweep_rows(
    db: Connection, environments: Environments, condition: str, *values: str
) -> list[SweepRow]:
    """Returns the sweeps that fit ``condition`` (the end of an SQL statement, never a user's
    text), without the numbers of their trials."""
    columns = f"{', '.join(SWEEP)}, status, created, updated, seal IS {SWEEP_SEAL}"
    sweeps = []
    fetched = db.execute(f"SELECT {columns} FROM sweeps {condition}", values).fetchall()
    for digest, name, kind, spec, source, where, *state, whole in fetched:
        if not whole:
            raise Damage(f"sweep {name} ({str(digest)[:12]}) is not as it was written")
        spec = _parsed(spec, f"the spec of sweep {name}")
        if not is_sweep((digest, name, kind, source), spec, *state):
            raise Damage(f"sweep {str(name)[:80]} has values of another type")
        sweeps.append(SweepRow(digest, name, kind, spec, source, environments(where), *state))
    return sweeps


def counted(db: Connection, sweep: SweepRow) -> SweepRow:
    """Returns the sweep with the numbers of its trials."""
    query = "SELECT status, count(*) FROM trials WHERE digest = ? GROUP BY status"
    by_status = dict(db.execute(query, (sweep.digest,)).fetchall())
    counts = {str(status): by_status[status] for status in STATUSES if status in by_status}
    return replace(sweep, total=sum(by_status.values()), counts=counts)


def trial_rows(
    db: Connection,
    environments: Environments,
    digest: str,
    condition: str,
    *values: int | str,
    table: Table = "trials",
) -> list[Kept]:
    """Returns the sweep's trials, or earlier recordings of them, that fit ``condition`` (as
    above)."""
    recordings = []
    query = f"SELECT {', '.join(TRIAL)}, seal IS {TRIAL_SEAL} FROM {table} WHERE digest = ?"
    fetched = db.execute(f"{query} {condition}", (digest, *values)).fetchall()
    for _, key, index, config, predicted, seq, *outcome, where, whole in fetched:
        status, reason, metrics, samples, *measured = outcome
        named = f"trial {key} of sweep {digest[:12]}"
        if not whole:
            raise Damage(f"{named} is not as it was written")
        texts = (config, predicted, metrics, samples)
        config, predicted, metrics, samples = (_parsed(text, named) for text in texts)
        if not isinstance(reason, str | None):
            raise Damage(f"{named} has a reason that is no text")
        environment = None if where is None else environments(where)
        plan = [key, index, config, predicted]
        trial = TrialRow(*[*plan, status, reason, metrics, samples, *measured, environment])
        if type(seq) is not int or not is_trial(trial):
            raise Damage(f"{named} has values of another type")
        recordings.append(Kept(trial, seq))
    return recordings


def check_seals(db: Connection, digest: str, key: str | None = None) -> None:
    """Raises Damage if a trial of the sweep (or the one of that key) was changed from outside."""
    only, values = ("", ()) if key is None else (" AND key = ?", (key,))
    row = db.execute(f"{BROKEN[0]} AND digest = ?{only}", (digest, *values)).fetchone()
    if row:
        raise Damage(f"trial {row[0]} of sweep {digest[:12]} is not as it was written")


def seal(db: Connection, digest: str) -> None:
    """Seals the trials of a sweep that were written since check_seals."""
    unsealed = f"digest = ? AND seal IS NOT {TRIAL_SEAL}"
    db.execute(f"UPDATE trials SET seal = {TRIAL_SEAL} WHERE {unsealed}", (digest,))


def _upsert(table: str, columns: Sequence[str], key: str, updated: Sequence[str], only: str) -> str:
    """Returns the statement that inserts a row, or updates columns of the one with that key."""
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
        f"ON CONFLICT ({key}) DO UPDATE SET "
        f"{', '.join(f'{column} = excluded.{column}' for column in updated)} {only}"
    )


def put_sweep(
    db: Connection,
    sweep: SweepInfo,
    status: SweepStatus,
    when: float,
    *updated: str,
    only: str = "",
) -> str:
    """Writes a sweep and makes it the latest; ``updated``: columns to change if it is known.

    Returns:
        The id of its environment.
    """
    identity = put_environment(db, sweep.environment)
    columns = (*SWEEP, "status", "created", "updated")
    statement = _upsert("sweeps", columns, "digest", (*SWEEP[1:], *updated), only)
    texts = (sweep.digest, sweep.name, sweep.kind, packed(sweep.spec), sweep.source)
    if db.execute(statement, (*texts, identity, status, when, when)).rowcount:
        mark = f"UPDATE sweeps SET turn = {NEXT_TURN}, seal = {SWEEP_SEAL} WHERE digest = ?"
        db.execute(mark, (sweep.digest,))
    return identity


def put_trials(db: Connection, digest: str, trials: Sequence[TrialInfo]) -> None:
    """Writes planned trials; outcomes stay."""
    changed = " OR ".join(f"{column} <> excluded.{column}" for column in _PLAN)
    statement = _upsert("trials", TRIAL[:5], "digest, key", _PLAN, f"WHERE {changed}")
    db.executemany(statement, [_planned(digest, trial) for trial in trials])


def _planned(digest: str, trial: TrialInfo | TrialRow) -> tuple[str, str, int, str, str]:
    """Returns the first values of a trial's row, those of its plan."""
    return digest, trial.key, trial.index, packed(trial.config), packed(trial.predicted)


def put_outcome(db: Connection, digest: str, key: str, outcome: Outcome) -> None:
    """Writes the outcome of a trial; ValueError if it was never begun."""
    query = "SELECT idx, config, predicted, attempts, started, ended FROM trials "
    row = db.execute(f"{query} WHERE digest = ? AND key = ?", (digest, key)).fetchone()
    if row is None:
        raise ValueError(f"trial {key} of sweep {digest[:12]} was not begun")
    check_seals(db, digest, key)
    index, config, predicted, attempts, *before = row
    ours = [float(outcome.started), float(outcome.ended)]
    if before != ours:
        attempts += outcome.attempts
        keep_earlier(db, digest, key)
    if outcome.environment is None:
        query = "SELECT environment FROM sweeps WHERE digest = ?"
        (environment,) = db.execute(query, (digest,)).fetchone()
    else:
        environment = put_environment(db, outcome.environment)
    numbers = packed(dict(outcome.metrics)), packed(dict(outcome.samples))
    ended = (outcome.status, outcome.reason, *numbers, outcome.point, attempts, *ours, environment)
    values = (next_seq(db, digest), *ended)
    # Sealed in the same statement: a row that is written twice takes twice the space in the log.
    changed = ", ".join(f"{column} = ?" for column in (*_OUTCOME, "seal"))
    sealed = (*values, seal_of(digest, key, index, config, predicted, *values))
    db.execute(f"UPDATE trials SET {changed} WHERE digest = ? AND key = ?", (*sealed, digest, key))


def keep_earlier(db: Connection, digest: str, key: str) -> None:
    """Adds what a trial has recorded to the history, before it records something else; a point
    that was pruned has measured nothing."""
    columns = f"{', '.join(TRIAL)}, seal"
    which = "WHERE digest = ? AND key = ? AND status <> 'pruned'"
    copy = f"INSERT INTO history ({columns}) SELECT {columns} FROM trials {which}"
    db.execute(copy, (digest, key))


def make_current(db: Connection, digest: str, key: str, seq: int) -> None:
    """Exchanges what a trial has recorded for an earlier recording, whose number is ``seq``."""
    keep_earlier(db, digest, key)
    chosen = (digest, key, seq)
    outcome = ", ".join(_OUTCOME)
    later = next_seq(db, digest)  # a reader of the changes sees it
    earlier = f"SELECT {outcome} FROM history WHERE digest = ? AND key = ? AND seq = ?"
    exchange = f"UPDATE trials SET ({outcome}) = ({earlier}) WHERE digest = ? AND key = ?"
    db.execute(exchange, (*chosen, digest, key))
    db.execute("UPDATE trials SET seq = ? WHERE digest = ? AND key = ?", (later, digest, key))
    db.execute("DELETE FROM history WHERE digest = ? AND key = ? AND seq = ?", chosen)


def restore_rows(
    db: Connection,
    sweep: SweepInfo,
    created: float,
    trials: Sequence[Kept],
    earlier: Sequence[Kept],
) -> tuple[int, int]:
    """Adds a sweep and recordings from elsewhere that are missing here.

    One of ``trials`` goes to the history if its trial has another; those of ``earlier`` all do.
    A number that is in use here is replaced.

    Returns:
        The numbers of added trials and of recordings added to the history.
    """
    check_seals(db, sweep.digest)
    put_sweep(db, sweep, "interrupted", created, "created", only=f"WHERE kind = '{UNKNOWN}'")
    current = _upsert("trials", TRIAL, "digest, key", _OUTCOME, "WHERE status IS NULL")
    past = f"INSERT INTO history ({', '.join(TRIAL)}, seal) VALUES (?{', ?' * len(TRIAL)})"
    held = f"SELECT seq, {', '.join(_RECORDING)} FROM {{}} WHERE digest = ?1"
    here = db.execute(" UNION ALL ".join(map(held.format, TABLES)), (sweep.digest,)).fetchall()
    taken, recordings = {seq for seq, *_ in here}, {tuple(recording) for _, *recording in here}
    added = earlier_added = 0
    for number, (trial, seq) in enumerate((*trials, *earlier)):
        if trial.status is not None:
            # The same recording may have another number here.
            recording = tuple(getattr(trial, name) for name in _RECORDING)
            if recording in recordings:
                continue
            recordings.add(recording)
            seq = seq if seq not in taken else max(taken) + 1
            taken.add(seq)
        where = None if trial.environment is None else put_environment(db, trial.environment)
        numbers = packed(trial.metrics), packed(trial.samples)
        outcome = (trial.status, trial.reason, *numbers, trial.point, trial.attempts)
        times = trial.started, trial.ended
        values = (*_planned(sweep.digest, trial), seq, *outcome, *times, where)
        # A trial that has been measured here takes no row: the other one is history.
        if number < len(trials) and db.execute(current, values).rowcount:
            added += 1
        elif trial.status not in (None, "pruned"):
            earlier_added += db.execute(past, (*values, seal_of(*values))).rowcount
    seal(db, sweep.digest)
    return added, earlier_added


def put_environment(db: Connection, environment: dict[str, Any]) -> str:
    """Stores an environment, once for all sweeps and trials; returns its id."""
    content = json.dumps(environment, sort_keys=True)
    identity = sha256(content.encode()).hexdigest()
    db.execute("INSERT OR IGNORE INTO environments VALUES (?, ?)", (identity, content))
    return identity


def next_seq(db: Connection, digest: str) -> int:
    """Returns the next number of a record. The write lock is held, so no reader has a later one."""
    # One query for each table: together sqlite would not use the index of the first.
    last = (f"SELECT max(seq) FROM {table} WHERE digest = ?" for table in TABLES)
    return max(db.execute(query, (digest,)).fetchone()[0] or 0 for query in last) + 1


def forget_unplanned(db: Connection, digest: str, planned: set[str]) -> None:
    """Removes the trials that have not ended and are not in the plan."""
    query = "SELECT key FROM trials WHERE digest = ? AND status IS NULL"
    gone = [(digest, key) for (key,) in db.execute(query, (digest,)) if key not in planned]
    db.executemany("DELETE FROM trials WHERE digest = ? AND key = ?", gone)


def record_pruned(
    db: Connection, sweep: SweepInfo, trials: Sequence[TrialInfo], environment: str, now: float
) -> None:
    """Records pruned trials, and resets those that are no longer pruned. Measured ones stay, but
    for those that a search of the present identity left out."""
    query = "SELECT key, status, reason FROM trials WHERE digest = ?"
    states = {key: state for key, *state in db.execute(query, (sweep.digest,))}
    seq = next_seq(db, sweep.digest)
    pruned, revived = [], []
    for trial in trials:
        status, reason = states[trial.key]
        place = (sweep.digest, trial.key)
        if trial.pruned is None:
            if status == "pruned":
                revived.append(place)
        elif (
            status is None
            or (status == "pruned" and reason != trial.pruned)
            # Or it was measured under another identity.
            or (status != "pruned" and trial.pruned == NOT_REQUESTED)
        ):
            keep_earlier(db, *place)
            point = point_digest({"kind": sweep.kind, **trial.config}, sweep.environment)
            pruned.append((seq, trial.pruned, point, now, now, environment, *place))
            seq += 1
    db.executemany(
        "UPDATE trials SET seq = ?, status = 'pruned', reason = ?, point = ?, started = ?, "
        "ended = ?, metrics = '{}', samples = '{}', environment = ? WHERE digest = ? AND key = ?",
        pruned,
    )
    db.executemany(
        "UPDATE trials SET seq = 0, status = NULL, reason = NULL, point = NULL, "
        "started = NULL, ended = NULL, environment = NULL WHERE digest = ? AND key = ?",
        revived,
    )


def packed(value: Any) -> str:
    """Returns compact JSON in the given order of keys, in which a config is shown."""
    return json.dumps(value, separators=(",", ":"))


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):  # from a schema without seals
        raise Damage(f"{what} cannot be read") from None


def environment(db: Connection, identity: str) -> dict[str, Any]:
    """Reads an environment; Damage if it is not as it was written."""
    row = db.execute("SELECT content FROM environments WHERE id = ?", (identity,)).fetchone()
    readable = row is not None and isinstance(row[0], str)
    if not readable or sha256(row[0].encode()).hexdigest() != identity:
        raise Damage(f"environment {identity[:12]} is not as it was written")
    content: dict[str, Any] = _parsed(row[0], f"environment {identity[:12]}")
    if not isinstance(content, dict):
        raise Damage(f"environment {identity[:12]} has values of another type")
    return content
