"""A damaged store is told from a whole one, and what can be read of it is saved."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from ringray.base.errors import DamagedStore, PlaceError
from ringray.lab.cli import main
from ringray.lab.store import recover as recovery
from ringray.lab.store import snapshot
from ringray.lab.store import store as store_module
from ringray.lab.store.recover import recover
from ringray.lab.store.store import Store
from ringray.lab.trial.outcome import UNKNOWN, Outcome, TrialRow
from tests.support.place import tiny
from tests.support.store_rows import DIGEST, OTHER, ok, sweep, trial

REPOSITORY = Path(__file__).resolve().parents[3]
COUNT, ENDED = 120, 90


def _outcome(index: int) -> Outcome:
    # Every tenth is longer than a page, so that its row goes on in others.
    samples = {"ms": [index / 7 + n for n in range(2000 if index % 10 == 0 else 20)]}
    return Outcome(
        "ok", None, {"median_ms": index / 3}, samples, f"{index:064x}", 1, index + 0.0, index + 0.5,
        {"os": "Linux", "batch": index // 40},
    )  # fmt: skip


def _fill(path: Path) -> list[TrialRow]:
    with Store(path) as store:
        store.begin(sweep(OTHER, "other"), [trial(0)])
        store.begin(sweep(), [trial(index) for index in range(COUNT)])
        for index in range(ENDED):
            store.record(DIGEST, trial(index).key, _outcome(index))
        store.finish(DIGEST, "interrupted")
        return store.trials(DIGEST)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[TrialRow]]:
    path = tmp_path_factory.mktemp("whole") / "store.db"
    return path, _fill(path)


@pytest.fixture
def path(tmp_path: Path, whole: tuple[Path, list[TrialRow]]) -> Path:
    return Path(shutil.copy(whole[0], tmp_path / "store.db"))


@pytest.fixture
def rows(whole: tuple[Path, list[TrialRow]]) -> list[TrialRow]:
    return whole[1]


def _overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def _header(path: Path) -> None:
    _overwrite(path, 0, b"\xee" * 4096)


def _middle(path: Path) -> None:
    _overwrite(path, path.stat().st_size // 2, bytes(20_000))


def _cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 2 // 3 + 100)


def _noise(path: Path) -> None:
    drawn = random.Random(7)
    for _ in range(12):
        _overwrite(path, drawn.randrange(8192, path.stat().st_size - 9), drawn.randbytes(8))


DAMAGES = [_header, _middle, _cut, _noise]


@pytest.mark.parametrize("damage", DAMAGES)
def test_with_its_snapshot_no_row_is_lost(
    path: Path, whole: tuple[Path, list[TrialRow]], damage: Callable[[Path], None]
) -> None:
    """The sweep has ended, which took a snapshot."""
    shutil.copy(snapshot.path_of(whole[0]), snapshot.path_of(path))
    damage(path)
    (saved,) = [one for one in recover(path).sweeps if one.digest == DIGEST]
    assert (saved.trials, saved.ended, saved.lost) == (COUNT, ENDED, ())
    with Store(path, create=False) as store:
        store.check()
        assert store.trials(DIGEST) == whole[1]
        assert [row.name for row in store.sweeps()] == ["quick", "other"]


# Without a snapshot sqlite finds the rows of whole pages that whole pages lead to.
@pytest.mark.parametrize(
    ("damage", "least"), list(zip(DAMAGES, [COUNT, COUNT // 3, 1, COUNT - 24], strict=True))
)
def test_what_can_be_read_is_saved(
    path: Path, rows: list[TrialRow], damage: Callable[[Path], None], least: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    damage(path)
    before = path.read_bytes()
    assert main(["status", "quick", "--store", str(path)]) == 2
    said = capsys.readouterr().err
    assert "ringray recover --store" in said
    assert "Traceback" not in said
    assert path.read_bytes() == before, "looking at it has changed it"
    result = recover(path)
    assert result.aside == path.with_name("store.db.damaged")
    assert result.aside.read_bytes() == before
    (saved,) = [one for one in result.sweeps if one.digest == DIGEST]
    with Store(path, create=False) as store:
        store.check()
        kept = {row.key: row for row in store.trials(DIGEST)}
        assert len(kept) >= least
        ended = {key for key, row in kept.items() if row.status}
        # Nothing is wrong, and all that had ended is either there or said to be lost.
        known = {row.key: row for row in rows}
        for key, row in kept.items():
            if row.status is None or row.environment:
                assert (row.status is None) or row == known[key]
        if damage is not _cut:  # the index may lie in what was cut off
            assert ended | set(saved.lost) == {row.key for row in rows if row.status}
        assert not ended & set(saved.lost)
        assert (saved.trials, saved.ended) == (len(kept), len(ended))
        # It is a store like any other: the sweep goes on, and keeps what was saved.
        store.begin(sweep(), [trial(index) for index in range(COUNT)])
        assert {row.key for row in store.trials(DIGEST) if row.status} == ended
        store.record(DIGEST, trial(0).key, ok(0))
    assert main(["recover", "--store", str(path)]) == 0
    assert "is not damaged; nothing was done" in capsys.readouterr().out


def test_while_a_driver_records_snapshots_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_SNAPSHOT_S", 0.0)
    monkeypatch.setattr(store_module, "_SNAPSHOT_SHARE", float("inf"))
    path = tmp_path / "store.db"
    with Store(path) as store:
        store.begin(sweep(), [trial(0), trial(1)])
        with store.lease(DIGEST):
            store.record(DIGEST, trial(0).key, ok(0))
            copy = snapshot.path_of(path)
            assert copy.stat().st_mode & 0o777 == 0o600
            with Store(shutil.copy(copy, tmp_path / "copy.db")) as taken:
                assert [row.status for row in taken.trials(DIGEST)] == ["ok", None]
    assert {one.name for one in tmp_path.glob("*store.db*")} == {"store.db", copy.name}


def test_a_damaged_store_does_not_replace_its_snapshot(path: Path) -> None:
    with Store(path) as store:
        store.finish(OTHER, "complete")
        good = snapshot.path_of(path).read_bytes()
    at = path.read_bytes().index(b'{"median_ms":1.3333333333333333}')
    _overwrite(path, at, b'{"median_ms":9')
    with Store(path) as store:
        store.finish(OTHER, "failed")
    assert snapshot.path_of(path).read_bytes() == good
    assert recover(path).aside is not None
    with Store(path) as store:
        assert store.find(DIGEST).counts == {"ok": ENDED}


def test_a_value_that_was_changed_is_noticed(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = path.read_bytes().index(b'{"median_ms":1.3333333333333333}')
    _overwrite(path, at, b'{"median_ms":9')  # right for sqlite, and right as JSON
    with Store(path, create=False) as store:
        store.check()
        with pytest.raises(
            DamagedStore, match=rf"trial {4:016x} of sweep .* not as it was written"
        ):
            store.trials(DIGEST)
        with pytest.raises(DamagedStore, match="not as it was written"):
            store.begin(sweep(), [trial(4)])
        with pytest.raises(DamagedStore, match="not as it was written"):
            store.record(DIGEST, trial(4).key, ok(4))
        store.record(DIGEST, trial(5).key, ok(5))
    assert main(["status", "quick", "--store", str(path)]) == 2
    assert "ringray recover" in capsys.readouterr().err
    assert main(["recover", "--store", str(path)]) == 0
    out = capsys.readouterr().out
    assert "89 of them ended, 1 earlier measurement; lost: 1 ended trial" in out
    assert f"lost: {4:016x}" in out
    assert main(["list", "--store", str(path)]) == 0


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE trials RENAME TO other; CREATE VIEW trials AS SELECT * FROM other",
        "CREATE VIEW other AS SELECT * FROM trials",
        "CREATE TRIGGER other AFTER UPDATE ON sweeps BEGIN DELETE FROM trials; END",
        "CREATE INDEX other ON trials (config LIKE '%1%')",
        "ALTER TABLE trials ADD COLUMN other AS (length(config))",
        "DROP TABLE leases",
        "PRAGMA user_version = 2",
        "PRAGMA user_version = 1",
        "PRAGMA user_version = 0",
        "PRAGMA user_version = -5",
    ],
)
def test_a_schema_that_is_not_ringrays_is_damage(
    path: Path, rows: list[TrialRow], change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A view could compute for ever, a trigger change what is written, a step run twice."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(change)
    before = path.read_bytes()
    spec = path.with_name("spec.yaml")
    spec.write_text(tiny("quick"))
    for words in (["list"], ["status", "quick"], ["run", str(spec), "--no-tracking"]):
        assert main([*words, "--store", str(path)]) == 2
        assert re.search(
            r"is damaged \(its \w+ '\w+' is not as schema -?\d has it\); `ringray recover",
            capsys.readouterr().err,
        )
    assert path.read_bytes() == before
    assert recover(path).aside is not None
    with Store(path, create=False) as store:
        assert store.trials(DIGEST) == rows


def test_a_sweep_whose_own_row_is_lost_is_taken_up_by_its_spec(
    path: Path, rows: list[TrialRow], capsys: pytest.CaptureFixture[str]
) -> None:
    at = path.read_bytes().index(b"name: quick")
    _overwrite(path, at, b"name: quack")
    with Store(path, create=False) as store, pytest.raises(DamagedStore, match="sweep quick"):
        store.find("quick")
    (saved, _) = sorted(recover(path).sweeps, key=lambda one: -one.trials)
    assert saved.nameless
    with Store(path, create=False) as store:
        assert store.find(DIGEST).kind == UNKNOWN
        assert main(["resume", "lost-ab12ab12ab12", "--store", str(path)]) == 2
        assert "`ringray run` with that spec takes up" in capsys.readouterr().err
        store.begin(sweep(), [trial(index) for index in range(COUNT)])
        assert store.find("quick").counts == {"ok": ENDED}
        assert store.trials(DIGEST) == rows


def test_what_only_the_log_holds_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "live" / "store.db"
    copy = tmp_path / "store.db"
    with Store(path) as store:
        store.begin(sweep(), [trial(0), trial(1)])
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        store.record(DIGEST, trial(1).key, ok(1))
        shutil.copy(path, copy)
        shutil.copy(f"{path}-wal", f"{copy}-wal")
    _overwrite(copy, 40, b"\xff" * 3000)
    recover(copy)
    with Store(copy, create=False) as store:
        assert [row.status for row in store.trials(DIGEST)] == [None, "ok"]
    assert (tmp_path / "store.db.damaged-wal").stat().st_size > 0


_WRITER = """
    import os, signal, sys
    from ringray.lab.store.store import *
    from ringray.lab.trial.outcome import *
    from tests.support.store_rows import *
    with Store(sys.argv[1]) as store:
        store.begin(sweep(), [trial(0), trial(1)])
        with store.lease(DIGEST):
            store.record(DIGEST, trial(0).key, ok(0))
            os.kill(os.getpid(), signal.SIGKILL)
    """


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    code = [sys.executable, "-c", textwrap.dedent(_WRITER), str(path)]
    assert subprocess.run(code, cwd=REPOSITORY, check=False).returncode == -signal.SIGKILL
    return path


def test_the_log_of_a_killed_driver_that_is_missing_is_told(
    killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(f"{killed}-wal").unlink()
    for _ in range(2):  # a command that reads leaves the lease of the killed driver
        assert main(["list", "--store", str(killed)]) == 0
        assert "lacks its log store.db-wal, though process" in capsys.readouterr().err
    with Store(killed, create=False) as store:
        assert store.doubt is not None
    assert main(["list", "--store", str(killed)]) == 0
    assert capsys.readouterr().err == "", "it is told until a driver came"


def test_a_killed_driver_alone_is_no_damage(killed: Path) -> None:
    for _ in range(2):  # the first to open it takes the log in
        with Store(killed, create=False) as store:
            assert store.doubt is None
            assert [row.status for row in store.trials(DIGEST)] == ["ok", None]


def test_an_empty_file_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store.db"
    path.touch()
    assert main(["resume", "quick", "--store", str(path)]) == 2
    assert "is damaged (the file is empty)" in capsys.readouterr().err
    assert main(["recover", "--store", str(path)]) == 2
    assert "--from-mlflow" in capsys.readouterr().err
    assert main(["recover", "--store", str(tmp_path / "none.db")]) == 2
    assert "there is no store at" in capsys.readouterr().err


def test_a_store_in_use_is_left_alone(path: Path) -> None:
    with Store(path) as store, store.lease(DIGEST):
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        with pytest.raises(PlaceError, match=r"is used by process .*; end that process first"):
            recover(path)
    assert not path.with_name("store.db.damaged").exists()


def test_a_store_whose_last_user_ends_meanwhile_is_read_again(
    path: Path, rows: list[TrialRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one to close a store moves its log into the file. Between the copies of both, rows
    would be in neither."""
    earlier = tmp_path / "earlier.db"
    with Store(earlier) as store:
        store.begin(sweep(), [trial(0)])
    real, calls = shutil.copyfile, list[str]()

    def racing(source: str, target: str) -> None:
        calls.append(source)
        if len(calls) == 1:
            os.utime(path)
            source = str(earlier)
        real(source, target)

    monkeypatch.setattr(recovery.shutil, "copyfile", racing)
    with closing(sqlite3.connect(path)) as db, db:  # so that there is something to recover
        db.execute("UPDATE trials SET ended = ended + 1 WHERE key = ?", (rows[0].key,))
    assert recover(path).aside is not None
    with Store(path) as store:
        ended = {row.key for row in store.trials(DIGEST) if row.status is not None}
    assert ended == {row.key for row in rows[1:] if row.status is not None}
    assert calls.count(str(path)) == 2


def test_a_second_recovery_keeps_both_damaged_files(path: Path) -> None:
    for name in ("store.db.damaged", "store.db.damaged-2"):
        _middle(path)
        assert recover(path).aside == path.with_name(name)


def test_a_store_of_the_first_schema_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    text = (Path(__file__).parent / "data" / "store_schema_1.sql").read_text()
    with sqlite3.connect(path) as old:
        old.executescript(text)
    old.close()
    with Store(path, create=False) as store:
        assert snapshot.path_of(path).read_bytes()[60:64] == bytes([0, 0, 0, 1]), "the older one"
        assert [row.name for row in store.sweeps()] == ["quick", "older"]
        assert store.find("quick").counts == {"ok": 2}
        assert [row.metrics for row in store.trials(DIGEST)[:2]] == [
            {"median_ms": 1.5}, {"median_ms": 2.5},
        ]  # fmt: skip
        assert [row.attempts for row in store.trials(OTHER)] == [3, 0]
        with store.lease(DIGEST):
            store.begin(sweep(), [trial(index) for index in range(4)])
            store.record(DIGEST, trial(2).key, ok(2))
        assert store.find("quick").counts == {"ok": 3}
    assert struct.unpack(">I", path.read_bytes()[60:64]) == (3,)
