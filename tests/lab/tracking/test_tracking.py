"""MLflow shows what the store holds: once, completely, whatever is killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringray.base.errors import PlaceError
from ringray.lab.store.store import Store
from ringray.lab.tracking import location as place
from ringray.lab.tracking.location import client_of
from ringray.lab.tracking.tracker import Tracker, sync
from ringray.lab.tracking.worker import Worker, receive, send
from ringray.lab.trial.outcome import SyncState
from tests.support.place import PATIENCE
from tests.support.tracking_store import (
    DIGEST,
    begin,
    check_complete,
    client,
    outcome,
    runs,
    trials,
    wait_for,
)

REPOSITORY = Path(__file__).resolve().parents[3]
FILES = {"spec.yaml", "results.csv", "trials.jsonl"}


def _files(parent: Any) -> set[str]:
    return {file.path for file in client().list_artifacts(parent.info.run_id)}


def test_a_sweep_becomes_one_parent_with_a_child_per_trial(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = trials(6, pruned=(5,))
    tracker = Tracker(store.path, DIGEST, None, "quick")
    begin(store, planned)
    tracker.start()
    tracker.close()  # too late to end it
    tracker.wait_ready()
    pid = tracker._worker.process.pid
    assert psutil.Process(pid).nice() == 19
    assert os.getsid(pid) == pid, "Ctrl-C in the terminal must not reach it"
    for number in (signal.SIGINT, signal.SIGTERM):  # its driver has them too, and decides
        os.kill(pid, number)
    for index, status in enumerate(("ok", "ok", "oom", "failed", "timeout")):
        store.record(DIGEST, planned[index].key, outcome(index, status))
    store.finish(DIGEST, "complete")
    # Asked for while the driver still has other things to end.
    tracker.ask_to_finish(timeout=PATIENCE)
    wait_for(lambda: runs()[0][0].info.status == "FINISHED")
    with monkeypatch.context() as patch:
        patch.setattr("ringray.lab.tracking.tracker.FIGURES_S", 0.0)
        late = "figures and report took more than 0 s"
        assert tracker.finish() == SyncState(6, 0, late)
    assert not psutil.pid_exists(pid)
    check_complete(store)
    parents, children = runs()
    parent, first = parents[0], children[planned[0].key]
    assert (parent.info.run_name, parent.info.status) == ("quick", "FINISHED")
    assert parent.data.params["heads"] == "8"
    assert "partition" not in parent.data.params
    counted = {"trials_ok": 2, "trials_oom": 1, "trials_pruned": 1, "best_ratio": 0.9}
    assert counted.items() <= parent.data.metrics.items()
    assert "6 of 6 trials ended" in parent.data.tags["mlflow.note.content"]
    assert first.info.run_name == "contiguous 1024"
    assert (first.info.start_time, first.info.end_time) == (10**12, 10**12 + 500)
    assert first.data.params["window"] == "null"
    assert first.data.tags["ringray.point"] == f"{0:064x}"
    statuses = [children[trial.key].info.status for trial in planned[:5]]
    assert statuses == ["FINISHED"] * 3 + ["FAILED"] * 2
    assert _files(parent) >= FILES
    assert str(store.path.parent / "artifacts") in parent.info.artifact_uri
    log = tracker._worker.log_path
    assert log.parent == store.path.parent / "logs"
    assert log.stat().st_mode & 0o777 == 0o600
    assert (store.path.parent / "artifacts").stat().st_mode & 0o077 == 0

    # Measured again by a driver that is gone: the same key, the new figures, nothing old.
    begin(store, planned)
    store.record(DIGEST, planned[0].key, outcome(0, shift=100.0))
    store.record(DIGEST, planned[2].key, outcome(2, "failed", shift=100.0))
    monkeypatch.setattr("ringray.lab.tracking.tracker.FIGURES_S", PATIENCE)
    assert sync(store.path, DIGEST, None, "quick") == SyncState(6, 0, None)
    check_complete(store)
    (parent,), again = runs()
    assert parent.info.status == "KILLED"
    assert _files(parent) == FILES | {"figures", "report.html"}
    assert again[planned[0].key].data.metrics["median_ms"] == 101.0
    assert again[planned[2].key].info.status == "FAILED"
    for trial in (planned[1], *planned[3:5]):
        assert again[trial.key].info.run_id == children[trial.key].info.run_id


def test_a_driver_that_dies_before_mlflow_is_open_loses_nothing(store: Store) -> None:
    unused = Tracker(store.path, DIGEST, None, "quick")
    unused.close()
    unused.close()
    assert not psutil.pid_exists(unused._worker.process.pid)
    begin(store, trials(2))
    store.record(DIGEST, trials(2)[0].key, outcome(0))
    tracker = Tracker(store.path, DIGEST, None, "quick").start()
    # The connection closes, as at the end of the driver.
    assert tracker._worker.end(patience=PATIENCE) == "exit code 0"
    check_complete(store)
    assert [run.info.status for run in runs()[0]] == ["KILLED"]


def test_the_end_of_a_process_is_noticed(store: Store) -> None:
    worker = Worker(DIGEST, "ringray.lab.tracking.process", 10.0, "http://127.0.0.1:1")
    assert receive(worker.connection, 0.01) is None
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(EOFError):
        receive(worker.connection, 30.0)
    send(worker.connection, "nobody reads this")
    with pytest.raises(EOFError):
        receive(worker.connection, 30.0)
    assert worker.end() == "SIGKILL"
    begin(store, trials(1))
    tracker = Tracker(store.path, DIGEST, None, "quick").start()
    os.kill(tracker._worker.process.pid, signal.SIGKILL)
    state = tracker.finish(PATIENCE)
    assert "its process ended (see " in str(state.error)


def _child_count(store: Store) -> int:
    import sqlite3

    with sqlite3.connect(store.path.parent / "mlflow.db") as db:
        return int(db.execute("SELECT count(*) FROM tags WHERE key = 'ringray.key'").fetchone()[0])


@pytest.mark.chaos
def test_a_tracker_killed_at_any_moment_doubles_nothing(store: Store) -> None:
    planned = trials(60)
    begin(store, planned)
    for index, trial in enumerate(planned):
        store.record(DIGEST, trial.key, outcome(index))
    for reached in (1, 20, 40):
        killed = Tracker(store.path, DIGEST, None, "quick").start()
        wait_for(lambda reached=reached: _child_count(store) > reached)
        os.kill(killed._worker.process.pid, signal.SIGKILL)
        killed._worker.end()
    store.finish(DIGEST, "interrupted")
    assert sync(store.path, DIGEST, None, "quick") == SyncState(60, 0, None)
    check_complete(store)
    assert runs()[0][0].info.status == "KILLED"


_DRIVER = """
    import sys, time
    from ringray.lab.store.store import *
    from ringray.lab.trial.outcome import *
    from ringray.lab.tracking.tracker import Tracker
    digest = sys.argv[2]
    with Store(sys.argv[1]) as store, store.lease(digest):
        tracker = Tracker(store.path, digest, None, "quick").start()
        for row in store.trials(digest)[:5]:
            store.record(digest, row.key, Outcome("ok", None, {"median_ms": 1.0}, started=1.0))
        tracker.wait_ready()
        print(tracker._worker.process.pid, flush=True)
        time.sleep(3600)
    """


@pytest.mark.exhaustive
def test_a_killed_driver_leaves_a_complete_record_and_no_process(store: Store) -> None:
    planned = trials(8)
    begin(store, planned)
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_DRIVER), str(store.path), DIGEST],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    driver.stdout.close()
    # The sweep goes on while the first tracker is still writing: the second waits for it.
    with store.lease(DIGEST):
        begin(store, planned)
        tracker = Tracker(store.path, DIGEST, None, "quick").start()
        tracker.wait_ready()
        with suppress(psutil.NoSuchProcess):  # it has let go of the sweep, and is about to end
            psutil.Process(pid).wait(timeout=PATIENCE)
        parents, children = runs()
        assert len(children) == 5
        assert [run.info.status for run in parents] == ["RUNNING"]
        first = parents[0].info.run_id
        pid = tracker._worker.process.pid
        with pytest.raises(PlaceError, match=f"written to MLflow by process {pid}"):
            sync(store.path, DIGEST, None, "quick")
        for index, trial in enumerate(planned[5:], start=5):
            store.record(DIGEST, trial.key, outcome(index))
        store.finish(DIGEST, "complete")
        assert tracker.finish(PATIENCE) == SyncState(8, 0, None)
    check_complete(store)
    assert [(run.info.run_id, run.info.status) for run in runs()[0]] == [(first, "FINISHED")]


def test_a_deleted_experiment_is_refused_before_anything_runs(store: Store) -> None:
    from ringray.lab.tracking.mlflow_sink import MLflowSink

    mlflow = client()
    mlflow.delete_experiment(mlflow.create_experiment("quick"))
    begin(store, trials(1))
    with pytest.raises(PlaceError, match=r"'quick' is in MLflow's trash; restore it"):
        MLflowSink(store, DIGEST, place.resolve_uri(None), "quick").refresh()


def test_doubles_are_mended(store: Store) -> None:
    from ringray.lab.tracking.mlflow_sink import MLflowSink

    begin(store, trials(3))
    for index, trial in enumerate(trials(3)):
        store.record(DIGEST, trial.key, outcome(index))
    rows, _ = store.changed_since(DIGEST, 0)
    uri = place.resolve_uri(None)
    first, second = (MLflowSink(store, DIGEST, uri, "quick", None) for _ in range(2))
    first.refresh()
    first.write(rows[0])
    second.refresh()
    # As if the answer to a first call had been lost.
    again = second._create_run("quick", None, second._sweep_tags())
    second.place = second.place._replace(run_id=again.info.run_id)
    second._children.clear()
    for each in rows:
        second.write(each)
    first.refresh()
    assert [first.write(each) for each in rows] == [False] * 3
    check_complete(store)


# MLflow's own database is whole in every home, whoever comes first and whoever is killed

OPEN = """
import sys
from ringray.lab.tracking.location import client_of
client = client_of(sys.argv[1])
client.create_run("0", tags={"who": sys.argv[2]})
"""


def opened(uri: str, who: str = "") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", OPEN, uri, who], stderr=subprocess.PIPE)


def new_sizes(path: Path) -> list[int]:
    return [file.stat().st_size for file in path.parent.glob(".mlflow*/new.db")]


@pytest.mark.slow
def test_processes_that_come_first_together_all_find_it_whole(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    place.check(uri)  # leaves an empty file, as in a driver
    first = [opened(uri, who) for who in "ab"]
    for process in first:
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
    stored = client_of(uri).search_runs(["0"])
    assert sorted(run.data.tags["who"] for run in stored) == ["a", "b"]


@pytest.mark.exhaustive
def test_a_process_killed_while_it_creates_it_leaves_nothing_broken(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    strike = "import os, pathlib; pathlib.Path.replace = lambda *_: os.kill(os.getpid(), 9)"
    uri = f"sqlite:///{path}"
    done = subprocess.run([sys.executable, "-c", f"{strike}\n{OPEN}", uri, ""], check=False)
    assert done.returncode == -signal.SIGKILL
    assert new_sizes(path)
    assert not path.exists() or path.stat().st_size == 0
    assert client_of(uri).search_experiments()
    assert not new_sizes(path)
