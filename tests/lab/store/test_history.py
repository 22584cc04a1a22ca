"""Earlier measurements of a trial stay in the store, through everything that happens to it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ringray.base import locks
from ringray.base.errors import PlaceError
from ringray.lab.cli import main
from ringray.lab.store import schema, snapshot
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import NOT_REQUESTED, Kept, Outcome
from tests.support import old_stores
from tests.support.store_rows import DIGEST, ENVIRONMENT, ok, sweep, trial

KEYS = [trial(index).key for index in range(3)]


def _twice(path: Path) -> None:
    """Three trials that were measured, two of them again with other code."""
    with Store(path) as store:
        store.begin(sweep(), [trial(index) for index in range(3)])
        for index in range(3):
            store.record(DIGEST, KEYS[index], ok(index))
        store.begin(sweep(environment={**ENVIRONMENT, "kernels": "k2"}), [trial(0)])
        for index in range(2):
            store.record(DIGEST, KEYS[index], ok(index + 10, started=20.0))
        store.finish(DIGEST, "complete")


def _all(store: Store) -> set[tuple[str, float | None]]:
    rows = [*store.trials(DIGEST), *(recording.trial for recording in store.history(DIGEST))]
    return {(row.key, row.metrics.get("median_ms")) for row in rows if row.status}


ALL = {(KEYS[index], index + 1.5) for index in range(3)} | {(KEYS[0], 11.5), (KEYS[1], 12.5)}


def test_what_was_measured_before_is_kept(tmp_path: Path) -> None:
    _twice(tmp_path / "store.db")
    with Store(tmp_path / "store.db") as store:
        assert [row.metrics["median_ms"] for row in store.trials(DIGEST)] == [11.5, 12.5, 3.5]
        earlier = store.history(DIGEST)
        assert [(recording.seq, recording.trial.metrics["median_ms"]) for recording in earlier] == [
            (1, 1.5),
            (2, 2.5),
        ]
        assert [recording.trial.environment for recording in earlier] == [ENVIRONMENT] * 2
        assert earlier[0].trial.samples == {"ms": [1.0, 2.0]}
        # Told twice, as after an answer that was lost, it is one measurement; attempts add up.
        store.record(DIGEST, KEYS[2], Outcome("failed", "lost a rank", attempts=3, ended=1.0))
        for _ in range(2):
            store.record(DIGEST, KEYS[2], ok(12, started=20.0))
            row = store.trials(DIGEST)[2]
            assert (row.status, row.reason, row.attempts) == ("ok", None, 5)
            assert len(store.history(DIGEST)) == 4
        store.forget(DIGEST)
        assert (store.trials(DIGEST), store.history(DIGEST)) == ([], [])


def test_an_earlier_measurement_becomes_current_again(tmp_path: Path) -> None:
    _twice(tmp_path / "store.db")
    with Store(tmp_path / "store.db") as store:
        _, cursor = store.changed_since(DIGEST, 0)
        for seq, current in ((1, 1.5), (4, 11.5)):  # back, and forth
            store.begin(sweep(), [trial(index) for index in range(3)], {KEYS[0]: seq})
            assert store.trials(DIGEST)[0].metrics == {"median_ms": current}
            rows, cursor = store.changed_since(DIGEST, cursor)
            assert [recording.trial.metrics["median_ms"] for recording in rows][-1:] == [current]
            assert len(rows) == 1
            assert _all(store) == ALL
        assert store.trials(DIGEST)[1].metrics == {"median_ms": 12.5}
        store.check()
        store.record(DIGEST, KEYS[0], ok(50, started=60.0))
        assert _all(store) == ALL | {(KEYS[0], 51.5)}


def test_a_point_that_a_search_leaves_out_now_keeps_what_it_measured(tmp_path: Path) -> None:
    _twice(tmp_path / "store.db")
    with Store(tmp_path / "store.db") as store:
        store.begin(sweep(), [trial(0, NOT_REQUESTED), trial(1), trial(2)])
        row = store.trials(DIGEST)[0]
        assert (row.status, row.metrics, row.samples) == ("pruned", {}, {})
        assert _all(store) - {(KEYS[0], None)} == ALL
        # What was pruned is no measurement, which the history has none of.
        store.begin(sweep(), [trial(index) for index in range(3)])
        store.record(DIGEST, KEYS[0], ok(50, started=60.0))
        assert len(store.history(DIGEST)) == 3


def test_what_comes_from_elsewhere_is_joined(tmp_path: Path) -> None:
    _twice(tmp_path / "a.db")
    with Store(tmp_path / "a.db") as first, Store(tmp_path / "b.db") as second:
        second.begin(sweep(), [trial(index) for index in range(3)])
        second.record(DIGEST, KEYS[0], ok(70, started=80.0))
        theirs = [Kept(row, seq) for seq, row in enumerate(first.trials(DIGEST), start=1)]
        for added in ((2, 3), (0, 0)):  # a second time there is nothing to add
            assert second.restore(sweep(), 0.0, theirs, first.history(DIGEST)) == added
            assert second.trials(DIGEST)[0].metrics == {"median_ms": 71.5}
            assert _all(second) == ALL | {(KEYS[0], 71.5)}
        numbers = [recording.seq for recording in second.history(DIGEST)]
        assert len({*numbers, second.sequence(DIGEST, KEYS[0])}) == len(numbers) + 1


def test_recover_keeps_the_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that only the snapshot still has join it."""
    path = tmp_path / "store.db"
    _twice(path)
    # The current measurement of one trial and the earlier one of another.
    lost = """UPDATE trials SET metrics = 'x'
        WHERE metrics IN ('{"median_ms":1.5}', '{"median_ms":12.5}')"""
    for with_snapshot in (True, False):
        with closing(sqlite3.connect(path)) as db, db:
            assert db.execute(lost).rowcount == 2
        if not with_snapshot:
            snapshot.path_of(path).unlink()
        assert main(["recover", "--store", str(path)]) == 0
        with Store(path) as store:
            if with_snapshot:
                assert _all(store) == ALL
                medians = [row.metrics["median_ms"] for row in store.trials(DIGEST)]
                assert medians == [11.5, 12.5, 3.5]
                store.finish(DIGEST, "complete")
            else:
                assert _all(store) == ALL - {(KEYS[0], 1.5), (KEYS[1], 12.5)}
    out = capsys.readouterr().out
    assert "3 trials, 3 of them ended, 2 earlier measurements\n" in out


@pytest.mark.parametrize("version", old_stores.SCHEMAS[:-1])
def test_a_store_of_an_older_schema_is_taken_over(tmp_path: Path, version: int) -> None:
    path = tmp_path / "store.db"
    old_stores.write(path, version)
    used = locks.hold(locks.lease_path(path, DIGEST, "driver"), str, None)
    with used, pytest.raises(PlaceError, match=r"is used by process .* of an older ringray"):
        Store(path)
    with Store(path, create=False) as store:
        assert snapshot.path_of(path).read_bytes()[60:64] == bytes([0, 0, 0, version])
        sweep = store.find("small")
        assert (sweep.counts, sweep.total) == ({"ok": 2, "pruned": 2, "failed": 1}, 8)
        first, second, third, *others = store.trials(sweep.digest)
        assert [row.attempts for row in (first, second, third)] == [2, 1, 3]
        assert (first.metrics, first.samples) == ({"median_ms": 11.0}, {"ms": [1.0, 2.0]})
        assert (third.reason, {row.status for row in others}) == ("it broke", {None, "pruned"})
        earlier = [
            recording.trial.metrics["median_ms"] for recording in store.history(sweep.digest)
        ]
        assert earlier == ([12.34] if version == 3 else [])
        assert (store.tracked(sweep.digest) is None, len(store.identity)) == (version == 1, 32)
        store.record(sweep.digest, first.key, ok(10, started=20.0))
        assert len(store.history(sweep.digest)) == len(earlier) + 1
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (schema.NEWEST,)
        assert not db.execute("PRAGMA foreign_key_check").fetchall()
    db.close()
