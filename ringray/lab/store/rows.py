"""Rows of the store's tables as the classes of :mod:`ringray.lab.trial.outcome`, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from sqlite3 import Connection
from typing import Any

from ringray.base.provenance import point_digest
from ringray.lab.store.schema import SWEEP, TRIAL, Damage
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

Environments = Callable[[str], dict[str, Any]]  # returns the decoded environment of that id
NEXT_TURN = "(SELECT ifnull(max(turn), 0) + 1 FROM sweeps)"
_OF_TRIAL = "WHERE digest = ? AND key = ?"
_INSERT = f"INSERT INTO trials VALUES (?{', ?' * len(TRIAL)})"  # the last one: is it current?


def sweep_rows(
    db: Connection, environments: Environments, condition: str, *values: str
) -> list[SweepRow]:
    """Returns the sweeps that fit ``condition`` (the end of an SQL statement, never a user's
    text), without the numbers of their trials."""
    sweeps = []
    columns = ", ".join((*SWEEP, "status", "created", "updated"))
    for row in db.execute(f"SELECT {columns} FROM sweeps {condition}", values).fetchall():
        digest, name, kind, spec, source, where, *state = row
        spec = _parsed(spec, f"the spec of sweep {name}")
        sweeps.append(SweepRow(digest, name, kind, spec, source, environments(where), *state))
    return sweeps


def counted(db: Connection, sweep: SweepRow) -> SweepRow:
    """Returns the sweep with the numbers of its trials."""
    query = "SELECT status, count(*) FROM trials WHERE digest = ? AND current GROUP BY status"
    by_status = dict(db.execute(query, (sweep.digest,)).fetchall())
    counts = {str(status): by_status[status] for status in STATUSES if status in by_status}
    return replace(sweep, total=sum(by_status.values()), counts=counts)


def trial_rows(
    db: Connection, environments: Environments, digest: str, condition: str, *values: int | str
) -> list[Kept]:
    """Returns the sweep's recordings of trials that fit ``condition`` (as above)."""
    query = f"SELECT {', '.join(TRIAL)} FROM trials WHERE digest = ? {condition}"
    fetched = db.execute(query, (digest, *values)).fetchall()
    return [recording(row, environments) for row in fetched]


def recording(row: tuple[Any, ...], environments: Environments) -> Kept:
    """Returns the recording of a trial from its row, the columns TRIAL; Damage if that fails."""
    digest, key, index, config, predicted, seq, status, reason, metrics, samples, *measured = row
    texts = (config, predicted, metrics, samples)
    config, predicted, metrics, samples = (
        _parsed(text, f"trial {key} of sweep {digest[:12]}") for text in texts
    )
    where = measured.pop()
    environment = None if where is None else environments(where)
    plan = [key, index, config, predicted]
    trial = TrialRow(*[*plan, status, reason, metrics, samples, *measured, environment])
    return Kept(trial, seq)


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
    changes = ", ".join(f"{column} = excluded.{column}" for column in (*SWEEP[1:], *updated))
    texts = (sweep.digest, sweep.name, sweep.kind, packed(sweep.spec), sweep.source)
    db.execute(
        f"INSERT INTO sweeps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, {NEXT_TURN}) "
        f"ON CONFLICT (digest) DO UPDATE SET {changes}, turn = excluded.turn {only}",
        (*texts, identity, status, when, when),
    )
    return identity


def put_trials(
    db: Connection, sweep: SweepInfo, trials: Sequence[TrialInfo], environment: str, now: float
) -> None:
    """Writes planned trials, records the pruned ones, and removes those that have not ended and are
    not planned any more. A measurement stays, unless a search of the present identity left it
    out."""
    query = (
        "SELECT key, status, reason, digest, key, idx, config, predicted FROM trials "
        "WHERE digest = ? AND current"
    )
    states = {
        key: (status, reason, tuple(plan))
        for key, status, reason, *plan in db.execute(query, (sweep.digest,))
    }
    planned = {trial.key for trial in trials}
    for key, (status, *_) in states.items():
        if status is None and key not in planned:
            retire(db, sweep.digest, key)
    seq = next_seq(db, sweep.digest)
    for trial in trials:
        status, reason, plan = states.get(trial.key, (None, None, None))
        measured = status not in (None, "pruned")
        stale = status == "pruned" and reason != trial.pruned
        prune = trial.pruned not in (None, reason)
        if measured:
            prune = trial.pruned == NOT_REQUESTED
        if prune or stale:
            retire(db, sweep.digest, trial.key)
            plan = None
        row = _planned(sweep.digest, trial)
        if prune:
            point = point_digest({"kind": sweep.kind, **trial.config}, sweep.environment)
            outcome = "pruned", trial.pruned, "{}", "{}", point, 0, now, now, environment
            db.execute(_INSERT, (*row, seq, *outcome, 1))
            seq += 1
        elif plan is None:
            columns = ", ".join(TRIAL[:5])
            db.execute(f"INSERT INTO trials ({columns}) VALUES (?, ?, ?, ?, ?)", row)
        elif plan != row:
            change = f"UPDATE trials SET idx = ?, config = ?, predicted = ? {_OF_TRIAL} AND current"
            db.execute(change, (*row[2:], *row[:2]))


def _planned(digest: str, trial: TrialInfo | TrialRow) -> tuple[str, str, int, str, str]:
    """Returns the first values of a trial's row, those of its plan."""
    return digest, trial.key, trial.index, packed(trial.config), packed(trial.predicted)


def put_outcome(db: Connection, digest: str, key: str, outcome: Outcome) -> None:
    """Writes the outcome of a trial; ValueError if it was never begun."""
    query = "SELECT idx, config, predicted, attempts, started, ended FROM trials"
    row = db.execute(f"{query} {_OF_TRIAL} AND current", (digest, key)).fetchone()
    if row is None:
        raise ValueError(f"trial {key} of sweep {digest[:12]} was not begun")
    *plan, attempts, started, ended = row
    times = (float(outcome.started), float(outcome.ended))
    seq = next_seq(db, digest)
    if (started, ended) == times:  # the same outcome once more
        db.execute(f"DELETE FROM trials {_OF_TRIAL} AND current", (digest, key))
    else:
        attempts += outcome.attempts
        retire(db, digest, key)
    if outcome.environment is None:
        query = "SELECT environment FROM sweeps WHERE digest = ?"
        (environment,) = db.execute(query, (digest,)).fetchone()
    else:
        environment = put_environment(db, outcome.environment)
    numbers = packed(dict(outcome.metrics)), packed(dict(outcome.samples))
    result = (outcome.status, outcome.reason, *numbers, outcome.point, attempts)
    db.execute(_INSERT, (digest, key, *plan, seq, *result, *times, environment, 1))


def retire(db: Connection, digest: str, key: str) -> None:
    """Moves what a trial has recorded to the history, before it records something else; a point
    that was pruned has measured nothing."""
    nothing = "current AND (status IS NULL OR status = 'pruned')"
    db.execute(f"DELETE FROM trials {_OF_TRIAL} AND {nothing}", (digest, key))
    db.execute(f"UPDATE trials SET current = 0 {_OF_TRIAL} AND current", (digest, key))


def make_current(db: Connection, digest: str, key: str, seq: int) -> None:
    """Makes an earlier recording of a trial, whose number is ``seq``, the current one."""
    retire(db, digest, key)
    later = next_seq(db, digest)  # a reader of the changes sees it
    change = f"UPDATE trials SET current = 1, seq = ? {_OF_TRIAL} AND seq = ?"
    db.execute(change, (later, digest, key, seq))


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
    put_sweep(db, sweep, "interrupted", created, "created", only=f"WHERE kind = '{UNKNOWN}'")
    query = "SELECT key, current, seq, status, point, started, ended FROM trials WHERE digest = ?"
    here = db.execute(query, (sweep.digest,)).fetchall()
    ended = {key: status is not None for key, current, _, status, *_ in here if current}
    taken = {seq for _, _, seq, *_ in here}
    recordings = {(key, *recording) for key, _, _, *recording in here}
    added = earlier_added = 0
    for number, (trial, seq) in enumerate((*trials, *earlier)):
        current = number < len(trials) and not ended.get(trial.key)
        # The same recording may have another number here.
        recording = trial.key, trial.status, trial.point, trial.started, trial.ended
        if recording in recordings or (not current and trial.status in (None, "pruned")):
            continue
        recordings.add(recording)
        if seq and seq in taken:
            seq = max(taken) + 1
        taken.add(seq)
        if current:
            retire(db, sweep.digest, trial.key)
            ended[trial.key] = trial.status is not None
        where = None if trial.environment is None else put_environment(db, trial.environment)
        numbers = packed(trial.metrics), packed(trial.samples)
        result = (trial.status, trial.reason, *numbers, trial.point, trial.attempts)
        times = trial.started, trial.ended
        plan = _planned(sweep.digest, trial)
        db.execute(_INSERT, (*plan, seq, *result, *times, where, int(current)))
        added += current
        earlier_added += not current
    return added, earlier_added


def put_environment(db: Connection, environment: dict[str, Any]) -> str:
    """Stores an environment, once for all sweeps and trials; returns its id."""
    content = json.dumps(environment, sort_keys=True)
    identity = sha256(content.encode()).hexdigest()
    db.execute("INSERT OR IGNORE INTO environments VALUES (?, ?)", (identity, content))
    return identity


def next_seq(db: Connection, digest: str) -> int:
    """Returns the next number of a record. The write lock is held, so no reader has a later one."""
    query = "SELECT max(seq) FROM trials WHERE digest = ?"
    return int(db.execute(query, (digest,)).fetchone()[0] or 0) + 1


def packed(value: Any) -> str:
    """Returns compact JSON in the given order of keys, in which a config is shown."""
    return json.dumps(value, separators=(",", ":"))


def environment(db: Connection, identity: str) -> dict[str, Any]:
    """Reads an environment; Damage if that fails."""
    row = db.execute("SELECT content FROM environments WHERE id = ?", (identity,)).fetchone()
    return _parsed(row and row[0], f"environment {identity[:12]}")


def _parsed(text: object, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)  # type: ignore[arg-type]
    except (ValueError, TypeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Damage(f"{what} cannot be read")
    return value
