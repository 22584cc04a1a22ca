"""Stores that move away, that links lead to, and with other things in their places."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ringray.base.errors import PlaceError
from ringray.lab import cli
from ringray.lab.store.recover import recover
from ringray.lab.store.schema import SWEEP_SEAL, TRIAL_SEAL, seal_of
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome
from tests.support.small_spec import fill


def _record(store: Store, digest: str) -> None:
    key = next(row.key for row in store.trials(digest) if row.status is None)
    outcome = Outcome("ok", None, {"median_ms": 1.5}, {}, "point", 1, 1.0, 2.0)
    store.record(digest, key, outcome)


@pytest.mark.parametrize("how", ["deleted", "replaced", "folder"])
def test_a_store_that_is_lost_while_it_is_in_use(tmp_path: Path, how: str) -> None:
    """Its content is saved beside it, and another store in its place keeps its own log."""
    path = tmp_path / "in" / "store.db"
    digest = fill(path).digest
    other = Store(tmp_path / "other.db")
    with Store(path) as store, store.lease(digest):
        _record(store, digest)
        held = store.trials(digest)
        if how == "folder":
            shutil.rmtree(path.parent)
        else:
            for ending in ("", "-wal", "-shm"):
                path.with_name(path.name + ending).unlink()
        if how == "replaced":
            other.begin(store.find(digest), [])
            for ending in ("", "-wal", "-shm"):
                Path(f"{other.path}{ending}").rename(f"{path}{ending}")
        with pytest.raises(PlaceError, match="while it is in use") as error:
            _record(store, digest)
        with pytest.raises(PlaceError, match=re.escape(str(error.value))):
            store.finish(digest, "interrupted")
    assert path.exists() == (how == "replaced")
    (saved,) = path.parent.glob("store.db.rescued-*")
    assert str(saved) in str(error.value)
    with Store(saved, create=False) as store:
        assert store.trials(digest) == held
    if how == "replaced":
        assert Path(f"{path}-wal").stat().st_size
        with Store(path, create=False) as store:
            assert store.find(digest).total == 0


def test_a_store_behind_a_link_is_the_same_store(tmp_path: Path) -> None:
    """With its log, which lies beside the file and not beside the link."""
    path, link = tmp_path / "far" / "store.db", tmp_path / "link.db"
    digest = fill(path).digest
    link.symlink_to(path)
    with Store(link) as store:
        assert store.path == path
        _record(store, digest)
        ended = [row.key for row in store.trials(digest) if row.status]
        for ending in ("", "-wal"):  # as a kill and a damage leave them
            shutil.copyfile(f"{path}{ending}", f"{tmp_path / 'copy'}{ending}")
    damaged = tmp_path / "copy"
    with damaged.open("r+b") as file:
        file.write(bytes(4096))
    link.unlink()
    link.symlink_to(damaged)
    result = recover(link)
    assert result.aside == tmp_path / "copy.damaged"
    assert [one.ended for one in result.sweeps] == [len(ended)]
    assert link.is_symlink()
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(PlaceError, match="cannot be opened"):
        Store(link)


@pytest.mark.parametrize("name", ["s.db", "s.db-wal", "s.db-shm", "s.db-journal", "tuned.json"])
def test_a_pipe_in_the_place_of_a_file_is_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No command waits for its other end."""
    os.mkfifo(tmp_path / name)
    store = str(tmp_path / "s.db")
    commands = [["tuned", "--import", str(tmp_path / name)]]
    if name.startswith("s.db"):
        commands = [["list", "--store", store], ["status", "x", "--store", store]]
    if name == "s.db":
        commands.append(["recover", "--store", store])
    if name == "s.db-wal":
        fill(tmp_path / "t.db")
        (tmp_path / "t.db").rename(store)
    for command in commands:
        assert cli.main(command) == 2
        said = capsys.readouterr().err
        assert "not a regular file" in said
        assert said.count("\n") == 1


@pytest.mark.parametrize("lock", ["driver", "tracker"])
def test_a_pipe_in_the_place_of_a_lock_hangs_nothing(tmp_path: Path, lock: str) -> None:
    path = tmp_path / "s.db"
    digest = fill(path).digest
    os.mkfifo(tmp_path / f".s.db.{digest[:12]}.{lock}.lock")
    with Store(path) as store:
        assert store.owner(digest, lock) is None  # type: ignore[arg-type]
        with pytest.raises(PlaceError, match="not a regular file"):
            store.lease(digest, lock).__enter__()  # type: ignore[arg-type]


_HUGE = 10**400
SEALS = {"trials": TRIAL_SEAL, "sweeps": SWEEP_SEAL}


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("trials", "metrics", json.dumps({"median_ms": "text"})),
        ("trials", "metrics", json.dumps({"median_ms": _HUGE})),
        ("trials", "metrics", "[]"),
        ("trials", "metrics", "[" * 100_000),
        ("trials", "samples", json.dumps({"ms": 1})),
        ("trials", "samples", json.dumps({"ms": [None]})),
        ("trials", "config", "3"),
        ("trials", "idx", "text"),
        ("trials", "attempts", 1.5),
        ("trials", "started", "text"),
        ("trials", "ended", 2**62),
        ("trials", "status", "fine"),
        ("trials", "reason", b"blob"),
        ("sweeps", "name", b"blob"),
        ("sweeps", "status", "fine"),
        ("sweeps", "updated", "text"),
        ("sweeps", "created", 2**62),
        ("sweeps", "spec", "[]"),
        ("environments", "content", b"blob"),
    ],
)
def test_values_of_another_type_are_one_line(
    tmp_path: Path, table: str, column: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also under seals that fit, from a person who made the store by hand."""
    path = tmp_path / "s.db"
    digest = fill(path).digest
    with closing(sqlite3.connect(path)) as db, db:
        db.create_function("seal_of", -1, seal_of)
        db.execute(f"UPDATE {table} SET {column} = ?", (value,))
        if table != "environments" and not isinstance(value, bytes):
            db.execute(f"UPDATE {table} SET seal = {SEALS[table]}")
    assert cli.main(["status", digest[:12], "--store", str(path), "--all"]) == 2
    said = capsys.readouterr().err
    assert "is damaged" in said, said
    assert "Traceback" not in said
