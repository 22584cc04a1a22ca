"""The store keeps what it was told, all or nothing, and says what is wrong with its place."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ringray.base.errors import PlaceError, UserError
from ringray.base.provenance import point_digest
from ringray.lab.store import schema
from ringray.lab.store.recover import recover
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import Outcome, record_line
from tests.support import old_stores
from tests.support.store_rows import DIGEST, ENVIRONMENT, OTHER, ok, sweep, trial


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store.db") as opened:
        yield opened


def test_what_is_recorded_is_read_back(store: Store) -> None:
    store.begin(sweep(), [trial(1), trial(0)])
    store.record(DIGEST, trial(1).key, ok(1))
    first, second = store.trials(DIGEST)
    assert (first.index, first.status, first.metrics, first.attempts) == (0, None, {}, 0)
    assert (second.index, second.status, second.config) == (1, "ok", {"seq_len": 65})
    assert (second.metrics, second.samples) == ({"median_ms": 2.5}, {"ms": [1.0, 2.0]})
    assert (second.started, second.ended, second.environment) == (5.0, 9.0, ENVIRONMENT)
    row = store.find("quick")
    assert (row.digest, row.status, row.total, row.counts) == (DIGEST, "running", 2, {"ok": 1})
    assert row.source == "name: quick\n"
    store.finish(DIGEST, "complete")
    assert store.find(DIGEST[:4]).status == "complete"


def test_a_record_line_has_the_keys_of_the_design(store: Store) -> None:
    cost = {"flops": 9, "time_ms": 2.0, "peak_memory_bytes": 10}
    store.begin(sweep(), [replace(trial(0), predicted=cost)])
    samples = {"ms": [math.nan, 2.0]}
    metrics = {"a": math.inf, "b": 1.0, "peak_memory_bytes": 9.0, "median_ms": math.inf}
    outcome = Outcome("failed", "boom", metrics, samples, ended=86400.25)
    store.record(DIGEST, trial(0).key, outcome)
    line = record_line(store.find("quick"), store.trials(DIGEST)[0])
    keys = "point sweep status reason config metrics environment format time name samples"
    assert list(line) == [*keys.split(), "predicted", "over_predicted"]
    assert line["metrics"] == {"a": None, "b": 1.0, "peak_memory_bytes": 9.0, "median_ms": None}
    assert line["predicted"] == {"flops": 9, "time_ms": 2.0, "peak_memory_bytes": 10}
    assert line["over_predicted"] == {"prediction_memory_ratio": 0.9}
    assert (line["format"], line["time"]) == (3, "1970-01-02T00:00:00.250000+00:00")
    assert (line["name"], line["samples"]) == ("quick", {"ms": [None, 2.0]})
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert line["environment"] == ENVIRONMENT


def test_pruned_trials_are_recorded_when_the_sweep_begins(store: Store) -> None:
    store.begin(sweep(), [trial(0), trial(1, "window needs causal")])
    rows, cursor = store.changed_since(DIGEST, 0)
    assert [(row.trial.key, row.trial.status, row.trial.reason) for row in rows] == [
        (trial(1).key, "pruned", "window needs causal")
    ]
    assert rows[0].trial.point == point_digest({"kind": "latency", **trial(1).config}, ENVIRONMENT)
    store.begin(sweep(), [trial(0), trial(1, "window needs causal")])
    assert store.changed_since(DIGEST, cursor) == ([], cursor)
    store.begin(sweep(), [trial(0), trial(1)])
    assert store.trials(DIGEST)[1].status is None


def test_beginning_again_keeps_what_has_ended_and_where_it_ran(store: Store) -> None:
    store.begin(sweep(), [trial(0), trial(1), trial(2)])
    store.record(DIGEST, trial(0).key, ok(0))
    store.finish(DIGEST, "interrupted")
    newer = {**ENVIRONMENT, "kernels": "k2"}
    store.begin(sweep(environment=newer), [trial(0, "now pruned"), trial(1), trial(3)])
    states = [(row.index, row.status) for row in store.trials(DIGEST)]
    assert states == [(0, "ok"), (1, None), (3, None)]
    store.record(DIGEST, trial(1).key, ok(1))
    older, new, _ = store.trials(DIGEST)
    assert (older.environment, new.environment) == (ENVIRONMENT, newer)
    assert store.find("quick").environment == newer
    assert store.find("quick").status == "running"
    store.begin(sweep(environment=newer), [trial(3)])
    assert [row.index for row in store.trials(DIGEST)] == [0, 1, 3], "what has ended stays"


def test_unknown_words_are_refused(store: Store) -> None:
    status = "done"
    store.begin(sweep(), [trial(0)])
    with pytest.raises(ValueError, match="expected one of ok, oom"):
        store.record(DIGEST, trial(0).key, Outcome(status))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected one of running, complete"):
        store.finish(DIGEST, status)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="was not begun"):
        store.record(DIGEST, "f" * 16, ok(0))


def test_a_sweep_is_found_by_name_or_by_the_start_of_its_digest(store: Store) -> None:
    with pytest.raises(UserError, match="the store is empty"):
        store.find("quick")
    store.begin(sweep(), [])
    store.begin(sweep(OTHER), [])
    assert store.find("quick").digest == OTHER
    assert store.find("AB12").digest == DIGEST
    store.begin(sweep("ab12" + "0" * 60, "quickest"), [])
    with pytest.raises(UserError, match=r"not unique: ab1200000000 .*; give more digits"):
        store.find("ab12")
    with pytest.raises(UserError, match="did you mean 'quickest'"):
        store.find("quickets")
    with pytest.raises(UserError, match="it knows quickest, quick"):
        store.find("ab1")


def test_places_that_cannot_be_used(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to be taken for one" * 20)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE t (x)")
    newer = tmp_path / "newer.db"
    Store(newer).close()
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in {
        tmp_path: "is a directory; name a file in it",
        text: "is not a database",
        foreign: "is a database of another program",
        newer: "was written by a newer ringray .*upgrade",
        pipe: "is not a regular file",
        text / "store.db": "notes.txt is a file, not a directory",
        Path("/proc/nowhere/store.db"): "cannot be created or opened",
    }.items():
        with pytest.raises(PlaceError, match=why) as error:
            Store(path)
        assert str(path) in str(error.value)
        assert error.value.exit_code == 2
    with pytest.raises(PlaceError, match=r"there is no store at .*ringray run SPEC"):
        Store(tmp_path / "absent.db", create=False)
    assert not (tmp_path / "absent.db").exists()
    with Store(tmp_path / "store.db") as store:
        store._db.execute("PRAGMA query_only = ON")
        with pytest.raises(PlaceError, match=r"store.db is not writable.*--store FILE"):
            store.begin(sweep(), [])


def test_a_full_disk_leaves_nothing_half_recorded(store: Store) -> None:
    store.begin(sweep(), [trial(0)])
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(PlaceError, match="its disk is full; free some space"):
        store.begin(sweep(OTHER, "big"), [trial(index) for index in range(2000)])
    assert [row.name for row in store.sweeps()] == ["quick"]
    assert store.trials(OTHER) == []
    store._db.execute("PRAGMA max_page_count = 100000")
    store.begin(sweep(OTHER, "big"), [trial(index) for index in range(2000)])
    assert store.find("big").total == 2000


def test_a_step_to_a_newer_schema_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    old_stores.write(path, 3)
    with sqlite3.connect(path) as db:
        before = [*db.iterdump()]
    monkeypatch.setattr(schema, "_STEPS", [*schema._STEPS[:-1], schema._STEPS[-1] + ";\nno SQL"])
    with pytest.raises(sqlite3.OperationalError, match="syntax error"):
        Store(path)
    assert [*db.iterdump()] == before
    db.close()
    monkeypatch.undo()
    with Store(path) as store:
        assert store.find("small").total == 8


@pytest.mark.parametrize("how", ["deleted", "replaced", "folder"])
def test_a_store_that_is_lost_while_it_is_in_use(tmp_path: Path, how: str) -> None:
    """Its content is saved beside it, and another store in its place keeps its own log."""
    path = tmp_path / "in" / "store.db"
    other = Store(tmp_path / "other.db")
    with Store(path) as store, store.lease(DIGEST):
        store.begin(sweep(), [trial(0), trial(1)])
        store.record(DIGEST, trial(0).key, ok(0))
        held = store.trials(DIGEST)
        if how == "folder":
            shutil.rmtree(path.parent)
        else:
            for ending in ("", "-wal", "-shm"):
                path.with_name(path.name + ending).unlink()
        if how == "replaced":
            other.begin(sweep(), [])
            for ending in ("", "-wal", "-shm"):
                Path(f"{other.path}{ending}").rename(f"{path}{ending}")
        with pytest.raises(PlaceError, match="while it is in use") as error:
            store.record(DIGEST, trial(1).key, ok(1))
        with pytest.raises(PlaceError, match=re.escape(str(error.value))):
            store.finish(DIGEST, "interrupted")
    assert path.exists() == (how == "replaced")
    (saved,) = path.parent.glob("store.db.rescued-*")
    assert str(saved) in str(error.value)
    with Store(saved, create=False) as store:
        assert store.trials(DIGEST) == held
    if how == "replaced":
        with Store(path, create=False) as store:
            assert store.find(DIGEST).total == 0


def test_a_store_behind_a_link_is_the_same_store(tmp_path: Path) -> None:
    """With its log, which lies beside the file and not beside the link."""
    path, link = tmp_path / "far" / "store.db", tmp_path / "link.db"
    Store(path).close()
    link.symlink_to(path)
    with Store(link) as store:
        assert store.path == path
        store.begin(sweep(), [trial(0)])
        assert {file.name for file in tmp_path.glob("*db*")} == {"link.db"}
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE sweeps SET spec = ''")
    assert recover(link).aside == tmp_path / "far" / "store.db.damaged"
    assert link.is_symlink()
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(PlaceError, match="cannot be opened"):
        Store(link)
