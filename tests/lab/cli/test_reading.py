"""Commands that read leave a store, and the folder that it lies in, as they are to the bit."""

from __future__ import annotations

import itertools
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringray.base.errors import PlaceError
from ringray.lab import cli
from ringray.lab.cli import watch
from ringray.lab.store import feed
from ringray.lab.store.store import Store, default_path
from ringray.lab.sweeps import results
from tests.support import old_stores
from tests.support.old_stores import SCHEMAS
from tests.support.small_spec import SMALL

# Each command of ringray is in one of these.
READ: dict[str, list[list[str]]] = {
    "list": [[]],
    "status": [["small"], ["small", "--all", "--history"], ["small", "--json", "-"]],
    "report": [["small", "-o", "-"]],
    "compare": [["small", "small"], ["STORE", "STORE:small", "--json", "-"]],
    "watch": [["small", "--lines"]],
    "plan": [["SPEC", "--json", "-"]],
    "advise": [["8b", "--on", "h100:1x8", "--context", "8k", "--json", "-"]],
    "tuned": [[]],
    "validate": [["SPEC"]],
    "schema": [[]],
    "examples": [[]],
    "completion": [["bash"]],
}
WRITE = {
    "run", "tune", "resume", "submit", "stop", "sync", "recover", "calibrate",
    "verify",  # runs code of others
    "doctor",  # tries whether the home folder can be written
}  # fmt: skip
LEFT = "ringray-00000000"  # the folder of a killed process, which a command that writes removes
IN_STORE = ("list", "status", "report", "compare", "watch")  # fail without a store


def test_every_command_says_whether_it_reads() -> None:
    assert {*READ, *WRITE} == {*cli.COMMANDS}


def _current(path: Path) -> None:
    old_stores.write(path, len(SCHEMAS))


def _closed(path: Path) -> None:
    _current(path)
    path.chmod(0o400)
    path.parent.chmod(0o500)


STORES: dict[str, Callable[[Path], None]] = {
    **{f"schema-{n}": lambda path, n=n: old_stores.write(path, n) for n in SCHEMAS},
    "log": lambda path: old_stores.leave_log(path, "WAL"),
    "journal": lambda path: old_stores.leave_log(path, "DELETE"),
    "closed": _closed,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home = tmp_path / "home"
    (home / "running").mkdir(parents=True)
    left = {"host": socket.gethostname(), "folder": str(tmp_path / LEFT), "births": {}}
    (home / "running" / f"{LEFT}.json").write_text(json.dumps(left))
    (tmp_path / LEFT).mkdir()
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("RINGRAY_HOME", str(home))
    # A second passes with each look: what `watch` sees does not depend on how busy a machine is.
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None, time=time.time)
    monkeypatch.setattr(feed, "time", clock)
    monkeypatch.setattr(watch, "LIFE_S", 4)
    yield home
    home.chmod(0o700)


def _files(*folders: Path) -> dict[str, tuple[int, int, int, bytes]]:
    found = [one for folder in folders for one in (folder, *folder.rglob("*"))]
    return {
        str(one): (
            now.st_ino,
            now.st_mode,
            now.st_mtime_ns,
            one.read_bytes() if one.is_file() else b"",
        )
        for one in found
        for now in [one.lstat()]
    }


def outputs(spec: Path, only: tuple[str, ...] = tuple(READ)) -> list[tuple[list[str], int, str]]:
    """Returns what each reading command prints of the default store, without times."""
    store, found = str(default_path()), []
    for command in ([name, *rest] for name in only for rest in READ[name]):
        out = StringIO()
        words = [word.replace("STORE", store).replace("SPEC", str(spec)) for word in command]
        with redirect_stdout(out), redirect_stderr(out):
            code = cli.main(words)
        found.append((command, code, re.sub(r'"ago": [\d.e+-]+', "", out.getvalue())))
    return found


@pytest.mark.parametrize("name", STORES)
def test_reading_changes_nothing(home: Path, name: str) -> None:
    """Twice: as it was left, and after a command that writes."""
    store, spec = home / "store.db", home.parent / "small.yaml"
    STORES[name](store)
    only = tuple(READ) if name == "log" else IN_STORE  # others do not depend on the store
    before = _files(home.parent)
    printed, frame = outputs(spec, only), results("small")
    assert _files(home.parent) == before
    assert [code for command, code, _ in printed if command[0] != "watch"].count(0) > len(only)
    assert len(frame) == 5
    home.chmod(0o700)
    store.chmod(0o600)
    Store(store, create=False).close()
    assert outputs(spec, only) == printed
    assert results("small").equals(frame)
    assert {one.name for one in home.iterdir()} >= {"store.db"}


_PASSES = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.execute("SELECT count(*) FROM sweeps").fetchone()
db.close()
"""


def test_reading_beside_a_driver(home: Path) -> None:
    """Its records are seen at once; its files stay as they are, and its locks on them: another
    process that comes and goes would else think itself alone and remove the log."""
    path = home / "store.db"
    _current(path)
    with Store(path) as store, Store(path, readonly=True) as reader:
        digest = store.find("small").digest
        with store.lease(digest):
            for status in ("interrupted", "complete", "failed"):
                store.finish(digest, status)
                assert reader.find("small").status == status
            before = [(one, one.stat()) for one in sorted(home.rglob("*"))]
            assert {code for _, code, _ in outputs(home.parent, ("list", "status"))} == {0}
            assert len(results("small")) == 5
            assert [(one, one.stat()) for one in sorted(home.rglob("*"))] == before
            Store(path, create=False).close()
            subprocess.run([sys.executable, "-c", _PASSES, path], check=True)
            assert path.with_name("store.db-wal").stat().st_size
        with pytest.raises(PlaceError, match="is not writable"):
            reader.finish(digest, "complete")
    with Store(path, create=False) as store:
        assert store.find("small").status == "failed"


def test_a_store_that_others_may_write_is_refused_in_one_sentence(home: Path) -> None:
    _current(home / "store.db")
    (home / "store.db").chmod(0o660)
    before = _files(home.parent)
    for command, code, printed in outputs(home.parent, IN_STORE):
        assert (code, printed.count("\n")) == (2, 1), command
        assert re.search("other users may write to .*chmod -R go-w", printed), printed
    assert _files(home.parent) == before
