"""A damaged store is told from a whole one, and what can be read of it is saved."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ringray.base.errors import DamagedStore, PlaceError
from ringray.lab.cli import main
from ringray.lab.store import snapshot
from ringray.lab.store import store as store_module
from ringray.lab.store.recover import recover
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import UNKNOWN, Outcome
from tests.support.store_rows import DIGEST, OTHER, ok, sweep, trial

COUNT, ENDED = 120, 90


def _outcome(index: int) -> Outcome:
    # Every tenth is longer than a page, so that its row goes on in others.
    samples = {"ms": [index / 7 + n for n in range(2000 if index % 10 == 0 else 20)]}
    times, environment = (index + 0.0, index + 0.5), {"os": "Linux", "batch": index // 40}
    metrics = {"median_ms": index / 3}
    return Outcome("ok", None, metrics, samples, f"{index:064x}", 1, *times, environment)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its snapshot, which the end of the sweep took."""
    path = tmp_path_factory.mktemp("whole") / "store.db"
    with Store(path) as store:
        store.begin(sweep(OTHER, "other"), [trial(0)])
        store.begin(sweep(), [trial(index) for index in range(COUNT)])
        for index in range(ENDED):
            store.record(DIGEST, trial(index).key, _outcome(index))
        store.finish(DIGEST, "interrupted")
    return path


@pytest.fixture
def path(tmp_path: Path, whole: Path) -> Path:
    shutil.copy(snapshot.path_of(whole), tmp_path)
    return Path(shutil.copy(whole, tmp_path / "store.db"))


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _middle(path: Path) -> None:
    _write(path, path.stat().st_size // 2, bytes(20_000))


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 2 // 3 + 100)


def _change(path: Path, *changes: str) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        for change in changes:
            db.execute(change)


def _text(path: Path) -> None:
    ended = f"digest = '{DIGEST}' AND key = '{trial(4).key}'"
    _change(path, f"UPDATE trials SET metrics = 'x' || metrics WHERE {ended}")


# Damages, and how many ended trials sqlite can still read at least.
DAMAGES: list[tuple[Callable[[Path], None], int]] = [
    (lambda path: _write(path, 0, b"\xee" * 4096), 0),
    (_middle, ENDED // 3),
    (_cut, ENDED * 6 // 10),  # many of them only through the index
    (_text, ENDED - 1),
]


@pytest.mark.parametrize(("damage", "least"), DAMAGES)
def test_a_damaged_store_is_recovered(
    path: Path, whole: Path, damage: Callable[[Path], None], least: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With its snapshot no row is lost; without it what can be read is saved."""
    with Store(whole, readonly=True) as store:
        identity, rows = store.identity, store.trials(DIGEST)
    damage(path)
    damaged = path.read_bytes()
    assert main(["status", "quick", "--store", str(path)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "ringray recover --store" in error
    with pytest.raises(DamagedStore), Store(path) as store, store.lease(DIGEST):
        store.trials(DIGEST)
    assert path.read_bytes() == damaged, "looking at it has changed it"
    assert main(["recover", "--store", str(path)]) == 0
    with Store(path, create=False) as store:
        store.check()
        assert (store.trials(DIGEST), store.identity) == (rows, identity)
        assert [row.name for row in store.sweeps()] == ["quick", "other"]
    # Without the snapshot.
    assert main(["recover", "--store", str(path)]) == 0
    assert "is not damaged; nothing was done" in capsys.readouterr().out
    path.write_bytes(damaged)
    snapshot.path_of(path).unlink()
    if not least:
        with pytest.raises(PlaceError, match=r"nothing in .*--from-mlflow"):
            recover(path)
        assert path.read_bytes() == damaged
        return
    result = recover(path)
    assert result.aside == path.with_name("store.db.damaged-2")
    assert result.aside.read_bytes() == damaged
    (saved,) = [saved for saved in result.sweeps if saved.sweep.digest == DIGEST]
    with Store(path, create=False) as store:
        ended = {row.key: row for row in store.trials(DIGEST) if row.status}
        assert len(ended) == saved.ended >= least
        for row in rows:
            expected = ended.get(row.key, row)
            assert row == expected or not expected.environment
        # It is a store like any other: the sweep goes on, and keeps what was saved.
        store.begin(sweep(), [trial(index) for index in range(COUNT)])
        assert {row.key for row in store.trials(DIGEST) if row.status} == {*ended}


def test_snapshots_follow_a_driver_and_none_is_taken_of_a_damaged_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_SNAPSHOT_S", 0.0)
    monkeypatch.setattr(store_module, "_SNAPSHOT_SHARE", float("inf"))
    path = tmp_path / "store.db"
    copy = snapshot.path_of(path)
    with Store(path) as store:
        store.begin(sweep(), [trial(index) for index in range(COUNT)])
        with store.lease(DIGEST):
            store.record(DIGEST, trial(0).key, ok(0))
            assert copy.stat().st_mode & 0o777 == 0o600
            with Store(copy, readonly=True) as taken:
                assert [row.status for row in taken.trials(DIGEST)[:2]] == ["ok", None]
    assert {file.name for file in tmp_path.glob("*store.db*")} == {"store.db", copy.name}
    before = copy.read_bytes()
    _middle(path)
    with sqlite3.connect(path) as db:
        snapshot.take(db, path)
    db.close()
    assert copy.read_bytes() == before


def test_a_sweep_whose_own_row_is_lost_is_taken_up_by_its_spec(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot.path_of(path).unlink()
    _change(path, f"UPDATE sweeps SET spec = '[1]' WHERE digest = '{DIGEST}'")
    with Store(path, create=False) as store:
        rows = store.trials(DIGEST)
        with pytest.raises(DamagedStore, match="the spec of sweep quick cannot be read"):
            store.find("quick")
    recover(path)
    with Store(path, create=False) as store:
        assert store.find(DIGEST).kind == UNKNOWN
        assert main(["resume", "lost-ab12ab12ab12", "--store", str(path)]) == 2
        assert "`ringray run` with that spec takes up" in capsys.readouterr().err
        store.begin(sweep(), [trial(index) for index in range(COUNT)])
        assert store.find("quick").counts == {"ok": ENDED}
        assert store.trials(DIGEST) == rows


def test_what_only_the_log_holds_is_saved(tmp_path: Path) -> None:
    path, copy = tmp_path / "live" / "store.db", tmp_path / "store.db"
    with Store(path) as store:
        store.begin(sweep(), [trial(0), trial(1), trial(2)])
        _change(path, f"UPDATE trials SET config = '' WHERE key = '{trial(0).key}'")
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        store.record(DIGEST, trial(1).key, ok(1))
        for ending in ("", "-wal"):
            shutil.copy(f"{path}{ending}", f"{copy}{ending}")
    recover(copy)
    with Store(copy, create=False) as store:
        assert [row.status for row in store.trials(DIGEST)] == ["ok", None]
    assert (tmp_path / "store.db.damaged-wal").stat().st_size > 0


def test_what_recover_leaves_alone(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = pytest.raises(PlaceError, match=r"is used by process .*; end that process first")
    with Store(path) as store, store.lease(DIGEST), used:
        recover(path)
    assert not path.with_name("store.db.damaged").exists()
    empty = path.with_name("empty.db")
    empty.touch()
    assert main(["resume", "quick", "--store", str(empty)]) == 2
    assert "is damaged (the file is empty)" in capsys.readouterr().err
    assert main(["recover", "--store", str(empty)]) == 2
    assert "--from-mlflow" in capsys.readouterr().err
    assert main(["recover", "--store", str(path.with_name("none.db"))]) == 2
    assert "there is no store at" in capsys.readouterr().err
