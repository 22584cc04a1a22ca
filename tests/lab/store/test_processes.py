"""One store and several processes: writers that are killed, and who may drive a sweep."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ringray.base import locks
from ringray.base.errors import PlaceError
from ringray.lab.store.store import Store
from tests.support.store_rows import DIGEST, OTHER, ok, sweep, trial


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store.db") as opened:
        yield opened


Start = Callable[..., Any]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python programs with arguments, which end with the test."""
    with ExitStack() as stack:

        def started(code: str, *arguments: object) -> subprocess.Popen[bytes]:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
            )  # fmt: skip
            stack.callback(process.kill)
            return process

        yield started


def test_a_store_that_cannot_be_opened_for_lack_of_space_says_so(
    tmp_path: Path, start: Start
) -> None:
    """Its log and the memory that processes share would lie beside it, on the full disk."""
    path = tmp_path / "store.db"
    with Store(path) as store:
        store.begin(sweep(), [trial(0)])
    full = """
        import resource, signal, sys
        from ringray.base.errors import PlaceError
        from ringray.lab.store.store import Store
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        Store(sys.argv[1], readonly=True).find("quick")  # needs no space
        try:
            Store(sys.argv[1])
        except PlaceError as error:
            print(error)
        """
    answer = start(full, path).stdout.read()
    assert b"the disk reports an error or has no space left; free some space" in answer
    with Store(path, create=False) as store:
        assert len(store.trials(DIGEST)) == 1


def test_a_killed_writer_leaves_whole_records(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "store.db"
    writer = start(
        """
        import sys
        from ringray.lab.store.store import *
        from ringray.lab.trial.outcome import *
        D = "ab12" * 16
        with Store(sys.argv[1]) as store:
            trials = [TrialInfo(f"{i:016x}", i, {}, {}) for i in range(5000)]
            store.begin(SweepInfo(D, "quick", "latency", {}, "", {}), trials)
            print("begun", flush=True)
            for i, trial in enumerate(trials):
                store.record(D, trial.key, Outcome("ok", None, {"i": i}, {"s": [i] * 9}))
        """,
        path,
    )
    assert writer.stdout.readline() == b"begun\n"
    cursor, seen = 0, []
    with Store(path, create=False) as reader:
        while len(seen) < 50:  # reads while the other writes
            rows, cursor = reader.changed_since(DIGEST, cursor)
            seen += [recording.trial for recording in rows]
        writer.kill()
        writer.wait()
        rows, _ = reader.changed_since(DIGEST, cursor)
        seen += [recording.trial for recording in rows]
        assert [row.metrics["i"] for row in seen] == list(range(len(seen)))
        assert all(row.samples == {"s": [row.index] * 9} for row in seen)
        assert reader._db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_many_processes_make_the_same_store(tmp_path: Path, start: Start) -> None:
    code = """
        import sys
        from ringray.lab.store.store import *
        from ringray.lab.trial.outcome import *
        print("ready", flush=True)
        sys.stdin.readline()
        with Store(sys.argv[1]) as store:
            store.begin(SweepInfo(sys.argv[2] * 64, "n" + sys.argv[2], "latency", {}, "", {}), [])
        """
    makers = [start(code, tmp_path / "store.db", index) for index in range(4)]
    assert [maker.stdout.readline() for maker in makers] == [b"ready\n"] * 4
    for maker in makers:
        maker.stdin.close()  # all at the same moment
    assert [maker.wait() for maker in makers] == [0] * 4
    with Store(tmp_path / "store.db", create=False) as store:
        assert sorted(row.name for row in store.sweeps()) == [f"n{i}" for i in range(4)]


_HOLDER = """
    import sys, time
    from ringray.lab.store.store import *
    from ringray.lab.trial.outcome import *
    with Store(sys.argv[1]) as store, store.lease(sys.argv[2]):
        print("held", flush=True)
        time.sleep(3600)
    """


def test_a_live_driver_is_named_and_a_dead_one_is_replaced(store: Store, start: Start) -> None:
    store.begin(sweep(), [trial(0)])
    holder = start(_HOLDER, store.path, DIGEST)
    assert holder.stdout.readline() == b"held\n"
    pid = holder.pid
    expected = f"sweep quick is being run by process {pid}; .*ringray resume quick"
    with pytest.raises(PlaceError, match=expected), store.lease(DIGEST):
        pass
    assert str(store.owner(DIGEST)) == f"process {pid}"
    with store.lease(OTHER), store.lease(DIGEST, role="tracker"):
        pass
    os.kill(pid, signal.SIGKILL)
    # Not waited for: a zombie has its pid still, and holds nothing.
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with store.lease(DIGEST):
        assert store.owner(DIGEST).pid == os.getpid()  # type: ignore[union-attr]
    assert store.owner(DIGEST) is None


def _left(store: Store, host: str, pid: int = 7) -> Path:
    """The file of a driver that was killed, or whose lock does not reach this machine."""
    path = store.path.with_name(f".store.db.{DIGEST[:12]}.driver.lock")
    path.write_text(f"{pid} {host} 1.5\n")
    return path


def test_a_lease_that_was_left_is_taken_over(store: Store) -> None:
    """Of a pid that is used again, which holds nothing; of another machine, which is noted."""
    store.begin(sweep(), [])
    noted: list[str] = []
    for host, count in ((socket.gethostname(), 0), ("far", 1)):
        _left(store, host, os.getpid())
        assert store.owner(DIGEST) is None
        with store.lease(DIGEST, note=noted.append), store.lease(DIGEST, role="tracker"):
            files = list(store.path.parent.glob(".store.db.*.lock"))
            assert [path.stat().st_mode & 0o777 for path in files] == [0o600] * 2
        assert not list(store.path.parent.glob(".store.db.*.lock"))
        assert len(noted) == count
    assert re.match("process .* on far did not end this sweep; its lock is free", noted[0])


def test_many_takers_and_lookers_never_share_a_lease(
    store: Store, tmp_path: Path, start: Start
) -> None:
    store.begin(sweep(), [])
    code = """
        import sys, time
        from pathlib import Path
        from ringray.base.errors import PlaceError
        from ringray.lab.store.store import *
        mark, got = Path(sys.argv[3]), 0
        with Store(sys.argv[1]) as store:
            while got < 10:
                store.owner(sys.argv[2])
                try:
                    with store.lease(sys.argv[2]):
                        mark.touch(exist_ok=False)
                        mark.unlink()
                        got += 1
                except PlaceError as error:
                    assert "is being run by process" in str(error), error
        """
    takers = [start(code, store.path, DIGEST, tmp_path / "mark") for _ in range(3)]
    assert [taker.wait() for taker in takers] == [0, 0, 0]


def test_a_file_system_without_locks_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    store.begin(sweep(), [])
    monkeypatch.setattr(locks.fcntl, "flock", none)
    with (
        pytest.raises(PlaceError, match=r"no locks available; .*on a file system with file locks"),
        store.lease(DIGEST),
    ):
        pass


def test_a_driver_that_lost_its_lease_records_no_more(store: Store) -> None:
    store.begin(sweep(), [trial(0)])
    with store.lease(DIGEST):
        _left(store, "far")
        with pytest.raises(PlaceError, match="taken over by another driver"):
            store.record(DIGEST, trial(0).key, ok(0))
        with pytest.raises(PlaceError, match="taken over"):
            store.finish(DIGEST, "complete")
    assert store.trials(DIGEST)[0].status is None
    assert _left(store, "far").exists(), "it is the other driver's"
