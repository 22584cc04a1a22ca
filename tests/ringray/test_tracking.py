"""MLflow shows what the store holds: once, completely, whatever is killed on the way."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringray import tracking_format as show
from ringray import tracking_place as place
from ringray.errors import PlaceError
from ringray.store import Outcome, Store, SweepInfo, TrialInfo, TrialRow
from ringray.tracking import SyncState, Tracker, sync
from ringray.tracking_channel import Channel

DIGEST = "cafe" * 16
ENVIRONMENT = {
    "hardware": {"cpu": "AMD", "cores": 2, "memory_bytes": 1 << 33, "gpus": ["A", "B"]},
    "versions": {"torch": "2.13.0", "triton": None},
    "git": {"commit": "f" * 40, "dirty": True},
    "os": "Linux",
    "python": "3.11",
    "code": "c" * 64,
    "kernels": "k" * 64,
}
PARTITIONS = ("contiguous", "striped", "zigzag", "zigzag-token")
REPOSITORY = Path(__file__).resolve().parents[2]


def config(index: int) -> dict[str, Any]:
    return {
        "ring_size": 2, "device": "cpu", "placement": "pack", "threads": 1,
        "seq_len": 1024 * (1 + index // 4), "batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64,
        "dtype": "float32", "causal": True, "window": None, "documents": None,
        "direction": "forward", "partition": PARTITIONS[index % 4], "transport": "ring",
        "backward": "auto", "backend": "auto", "blocks": None, "warmup": 1, "repeats": 5,
        "replica": 0, "seed": 0, "baseline": "sdpa", "baseline_threads": 2,
    }  # fmt: skip


def trials(count: int, pruned: tuple[int, ...] = ()) -> list[TrialInfo]:
    return [
        TrialInfo(
            f"{index:016x}", index, config(index), {"time_ms": 1.0},
            "too large" if index in pruned else None,
        )
        for index in range(count)
    ]  # fmt: skip


def outcome(index: int, status: Any = "ok", shift: float = 0.0) -> Outcome:
    metrics = {"median_ms": index + 1.0 + shift, "ratio": 0.9 + index / 100, "tflops": 0.5}
    metrics |= {f"extra_{number}": number / 7 for number in range(11)} | {"bad": math.inf}
    return Outcome(
        status, None if status == "ok" else f"it {status}", metrics if status == "ok" else {},
        {"ms": [1.0] * 5}, f"{index:064x}", 1, 1e9 + index + shift, 1e9 + index + shift + 0.5,
    )  # fmt: skip


def begin(store: Store, planned: list[TrialInfo]) -> None:
    spec = {"name": "quick", "kind": "latency"}
    store.begin(SweepInfo(DIGEST, "quick", "latency", spec, "name: quick\n", ENVIRONMENT), planned)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Path) -> Iterator[Store]:
    """A store in a home of its own, beside a fresh MLflow database (made once: it takes 2 s)."""
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path))
    (tmp_path / "mlflow.db").write_bytes(schema.read_bytes())
    with Store(tmp_path / "store.db") as opened:
        yield opened


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schema") / "mlflow.db"
    _client(f"sqlite:///{path}").search_experiments()
    return path


def _client(uri: str | None = None) -> Any:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri or place.resolve_uri(None))


def runs(uri: str | None = None, experiment: str = "quick") -> tuple[list[Any], dict[str, Any]]:
    """The parent runs, and the child runs by key; fails on a double."""
    client = _client(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return [], {}
    parents, children = [], {}
    for run in client.search_runs([found.experiment_id], max_results=1000):
        if run.data.tags["ringray.role"] == "sweep":
            parents.append(run)
        else:
            key = run.data.tags["ringray.key"]
            assert key not in children, f"{key} twice"
            children[key] = run
    return parents, children


def check_complete(store: Store, uri: str | None = None) -> None:
    """One parent, and one up-to-date child per ended trial with every metric once."""
    client = _client(uri)
    parents, children = runs(uri)
    assert len(parents) == 1
    ended = {row.key: row for row in store.trials(DIGEST) if row.status}
    assert set(children) == set(ended)
    for key, run in children.items():
        assert run.data.tags["mlflow.parentRunId"] == parents[0].info.run_id
        assert run.data.tags["ringray.record"] == show.record_digest(ended[key])
        assert run.data.metrics == show.finite(ended[key].metrics)
        assert run.info.status in ("FINISHED", "FAILED")
        for name in list(run.data.metrics)[:2]:
            assert len(client.get_metric_history(run.info.run_id, name)) == 1


# Without MLflow


def row(index: int, status: Any = "ok", **changes: Any) -> TrialRow:
    end = outcome(index, status)
    return TrialRow(
        f"{index:016x}", index, config(index) | changes, {}, status, end.reason,
        dict(end.metrics), {}, end.point, 1, end.started, end.ended, ENVIRONMENT,
    )  # fmt: skip


@pytest.fixture
def sweep_row(tmp_path: Path) -> Any:
    with Store(tmp_path / "s.db") as store:
        begin(store, [])
        return store.find("quick")


def test_a_name_says_what_varies(sweep_row: Any) -> None:
    rows = [row(0), row(2, ring_size=4, dtype="bfloat16", direction="forward+backward")]
    assert list(show.run_names(sweep_row, rows).values()) == [
        "contiguous ring2 forward float32",
        "zigzag ring4 forward+backward bfloat16",
    ]
    rows = [
        row(0, window=7, documents={"lengths": [1, 2]}, blocks=128, causal=True, kv_heads=2),
        row(4, documents=3, causal=False, replica=1),
    ]
    assert list(show.run_names(sweep_row, rows).values()) == [
        "1024 kv2 causal window7 docs2 blocks128 replica0",
        "2048 kv8 full no-window docs3 default-blocks replica1",
    ]
    assert list(show.run_names(sweep_row, [row(0)]).values()) == ["latency"]


def test_params_metrics_and_tags_fit_mlflow(sweep_row: Any) -> None:
    odd = {"window": None, "causal": True, "documents": {"lengths": list(range(9999))}, "a=b": "x"}
    found = show.params(odd)
    assert found["window"] == "null"
    assert found["causal"] == "true"
    assert len(found["documents"]) == 6000
    assert found["a_b"] == "x"
    assert show.finite({"a": math.inf, "b": math.nan, "c": 1}) == {"c": 1.0}
    tags = show.trial_tags(sweep_row, row(1, "failed"), "parent")
    assert tags["ringray.status"] == "failed"
    assert tags["ringray.reason"] == "it failed"
    assert tags["hardware.gpus"] == "A, B"
    assert tags["versions.torch"] == "2.13.0"
    assert "versions.triton" not in tags
    assert tags["git.dirty"] == "true"
    assert show.tag_texts({"a": "x\0y" + "z" * 9000, "b": None, "c": ""}) == {
        "a": "x y" + "z" * 7997
    }


def test_the_note_fits_one_tag_and_counts_everything(sweep_row: Any) -> None:
    rows = [row(index) for index in range(500)] + [row(500, "oom")]
    note = show.note(sweep_row, rows)
    assert len(note) <= 8000
    assert note.startswith("**quick** (latency): 501 of 501 trials ended: 500 ok, 1 oom")
    assert "| contiguous 1024 | ok | 1 | 0.9 | 0.5 |" in note
    assert "more: see `results.csv`" in note
    assert show.summary_metrics(rows)["best_ratio"] == 0.9
    assert show.summary_metrics(rows)["trials_oom"] == 1.0
    assert "none yet" in show.note(sweep_row, [])


def test_tables_have_a_row_per_ended_trial(sweep_row: Any) -> None:
    rows = [row(0), row(1, "failed")]
    columns, cells = show.results_table(sweep_row, rows)
    assert columns[:4] == ["trial", "key", "status", "reason"]
    assert [len(line) for line in cells] == [len(columns)] * 2
    assert cells[1][columns.index("median_ms")] is None
    assert len(show.results_csv(columns, cells).splitlines()) == 3
    assert len(json.loads(show.results_json(sweep_row, rows))) == 2


def test_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert place.resolve_uri(None) == f"sqlite:///{tmp_path}/mlflow.db"
    assert place.resolve_uri("sqlite:///sub/x.db") == f"sqlite:///{tmp_path}/sub/x.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    assert place.resolve_uri(None) == "http://host:5000"
    assert place.resolve_uri("https://other") == "https://other"
    assert place.artifact_root("https://other") is None
    assert place.ui_command("http://u:p@host:5000/", "1", "r") == (
        "http://***@host:5000/#/experiments/1/runs/r"
    )
    command = place.ui_command("sqlite:////a b/m.db")
    assert command.endswith("ui --backend-store-uri 'sqlite:////a b/m.db' --host 127.0.0.1")
    assert "secret" not in place.ui_command("postgresql://me:secret@db/mlflow")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_place_that_cannot_be_used_is_named_at_once(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_text("no database at all " * 99)
    Store(tmp_path / "store.db").close()
    begun = time.monotonic()
    for uri, why in {
        f"http://u:hush@127.0.0.1:{_free_port()}": "no MLflow server answers at .*refused.*start",
        "http://127.0.0.1:99999": "Port out of range",
        "http://": "names no host",
        "sqlite://": "names no file: expected sqlite:///PATH",
        "sqlite:///:memory:": "names no file",
        f"sqlite:///{tmp_path}": "is a directory",
        f"sqlite:///{text}": "cannot be used: file is not a database",
        f"sqlite:///{tmp_path}/store.db": "belongs to another program",
        f"sqlite:///{text}/below.db": "cannot be opened",
        "sqlite:////proc/nowhere/m.db": "cannot be opened",
        "./mlruns": "expected http://HOST:PORT, https://..., sqlite:///PATH, postgresql://",
        "file:///tmp/mlruns": "given up plain folders",
        "ftp://host": "of no known kind",
    }.items():
        with pytest.raises(PlaceError, match=why) as error:
            place.check(uri)
        assert "tracking.uri" in str(error.value)
        assert "hush" not in str(error.value)
    assert time.monotonic() - begun < 3
    place.check(f"sqlite:///{tmp_path}/new/m.db")


def test_a_server_that_never_answers_costs_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "PROBE_S", 0.2)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        with pytest.raises(PlaceError, match="timed out"):
            place.check(f"http://127.0.0.1:{deaf.getsockname()[1]}")


def test_the_channel_keeps_lines_together() -> None:
    read, write = os.pipe()
    channel = Channel(read, write)
    assert channel.receive(0.01) is None
    assert not channel.closed
    os.write(write, b'noise\n[1]\n{"a": 1}\n{"b"')
    assert channel.receive(1) == {"a": 1}
    assert channel.receive(0.01) is None
    os.write(write, b": 2}\n")
    assert channel.receive(1) == {"b": 2}
    os.close(write)
    assert channel.receive(1) is None
    assert channel.closed
    os.close(read)
    assert not Channel(read, write).send({})


class FakeMLflow:
    """Stands for the projection: refuses some keys, or everything, or every file."""

    def __init__(self, refused: set[str], files: bool = True) -> None:
        self.refused, self.files, self.up = refused, files, True
        self.written: list[str] = []
        self.closed = 0

    def refresh(self) -> None:
        if not self.up:
            raise ConnectionError("down at http://me:hush@host")

    def write(self, trial: TrialRow) -> bool:
        self.refresh()
        if trial.key in self.refused:
            raise ValueError("refused")
        self.written.append(trial.key)
        return True

    def close(self) -> None:
        self.refresh()
        self.closed += 1

    summarise = refresh

    def log_results(self) -> None:
        self.refresh()
        if not self.files:
            raise OSError("no bucket")

    log_plan = log_results


def _session(tmp_path: Path, fake: FakeMLflow, patience: float) -> dict[str, Any]:
    from ringray.tracking_process import Session

    (commands, told), (answers, said) = os.pipe(), os.pipe()
    with Store(tmp_path / "s.db") as store:
        begin(store, trials(4))
        for index, trial in enumerate(trials(4)):
            store.record(DIGEST, trial.key, outcome(index))
        Channel(-1, told).send({"finish": True, "timeout": 20.0, "patience": patience})
        session = Session(store, DIGEST, fake, Channel(commands, said))  # type: ignore[arg-type]
        session.run()
    message = Channel(answers, -1).receive(1)
    for end in (commands, told, answers, said):
        os.close(end)
    assert message
    return message


def test_a_refused_trial_blocks_no_other(tmp_path: Path) -> None:
    fake = FakeMLflow({f"{1:016x}"})
    message = _session(tmp_path, fake, patience=0.3)
    assert message == {"written": 3, "pending": 1, "error": "ValueError: refused"}
    assert fake.closed == 1


def test_files_that_cannot_be_kept_do_not_hold_up_the_runs(tmp_path: Path) -> None:
    fake = FakeMLflow(set(), files=False)
    begun = time.monotonic()
    message = _session(tmp_path, fake, patience=15.0)
    assert time.monotonic() - begun < 8
    assert (message["written"], message["pending"]) == (4, 0)
    assert "no bucket" in message["error"]
    assert fake.closed == 1


def test_an_outage_at_the_end_is_given_up(tmp_path: Path) -> None:
    fake = FakeMLflow(set())
    fake.up = False
    message = _session(tmp_path, fake, patience=0.3)
    assert message == {
        "written": 0, "pending": 4, "error": "ConnectionError: down at http://***@host",
    }  # fmt: skip
    assert fake.closed == 0


# With MLflow on sqlite


def test_a_sweep_becomes_one_parent_with_a_child_per_trial(store: Store) -> None:
    planned = trials(6, pruned=(5,))
    begin(store, planned)
    tracker = Tracker.start(store.path, DIGEST, None, "quick")
    tracker.wait_ready()
    assert psutil.Process(tracker.pid).nice() == 19
    assert os.getsid(tracker.pid) == tracker.pid, "Ctrl-C in the terminal must not reach it"
    for index, status in enumerate(("ok", "ok", "oom", "failed", "timeout")):
        store.record(DIGEST, planned[index].key, outcome(index, status))
    store.finish(DIGEST, "complete")
    assert tracker.finish() == SyncState(6, 0, None)
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
    statuses = [children[trial.key].info.status for trial in planned]
    assert statuses == ["FINISHED"] * 3 + ["FAILED"] * 2 + ["FINISHED"]
    client = _client()
    artifacts = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert artifacts == {
        "spec.yaml", "plan.json", "results.csv", "results.json", "results_table.json",
    }  # fmt: skip
    assert str(store.path.parent / "artifacts") in parent.info.artifact_uri
    log = tracker.log_path
    assert log.parent == store.path.parent / "logs"
    assert log.stat().st_mode & 0o777 == 0o600
    assert (store.path.parent / "artifacts").stat().st_mode & 0o077 == 0

    # Measured again, and synchronised afterwards: the same key, the new figures, nothing old.
    store.record(DIGEST, planned[0].key, outcome(0, shift=100.0))
    store.record(DIGEST, planned[1].key, outcome(1, "failed", shift=100.0))
    assert sync(store.path, DIGEST, None, "quick") == SyncState(6, 0, None)
    check_complete(store)
    _, again = runs()
    assert again[planned[0].key].data.metrics["median_ms"] == 101.0
    assert again[planned[1].key].data.metrics == {}
    assert again[planned[1].key].info.status == "FAILED"
    for trial in planned[2:]:
        assert again[trial.key].info.run_id == children[trial.key].info.run_id


def _wait_for(condition: Callable[[], Any], seconds: float = 20.0, pause: float = 0.02) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(pause)


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
    for reached in (1, 20):
        killed = Tracker.start(store.path, DIGEST, None, "quick")
        _wait_for(lambda reached=reached: _child_count(store) > reached)
        os.kill(killed.pid, signal.SIGKILL)
        killed._end()
    tracker = Tracker.start(store.path, DIGEST, None, "quick")
    tracker.wait_ready()
    _wait_for(lambda: _child_count(store) > 40)
    os.kill(tracker.pid, signal.SIGKILL)
    store.finish(DIGEST, "interrupted")
    # The driver's own end starts it once more.
    assert tracker.finish() == SyncState(60, 0, None)
    check_complete(store)
    assert runs()[0][0].info.status == "KILLED"


_DRIVER = """
    import sys, time
    from ringray.store import *
    from ringray.tracking import Tracker
    digest = sys.argv[2]
    with Store(sys.argv[1]) as store, store.lease(digest):
        tracker = Tracker.start(store.path, digest, None, "quick")
        for row in store.trials(digest)[:5]:
            store.record(digest, row.key, Outcome("ok", None, {"median_ms": 1.0}, started=1.0))
        tracker.wait_ready()
        print(tracker.pid, flush=True)
        time.sleep(60)
    """


def test_a_killed_driver_leaves_a_complete_record_and_no_process(store: Store) -> None:
    planned = trials(8)
    begin(store, planned)
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_DRIVER), str(store.path), DIGEST],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert driver.stdout
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    driver.stdout.close()
    # The sweep goes on while the first tracker is still writing: the second waits for it.
    with store.lease(DIGEST):
        begin(store, planned)
        tracker = Tracker.start(store.path, DIGEST, None, "quick")
        tracker.wait_ready()
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
        parents, children = runs()
        assert len(children) == 5
        assert [run.info.status for run in parents] == ["RUNNING"]
        first = parents[0].info.run_id
        with pytest.raises(PlaceError, match=f"written to MLflow by process {tracker.pid}"):
            sync(store.path, DIGEST, None, "quick")
        for index, trial in enumerate(planned[5:], start=5):
            store.record(DIGEST, trial.key, outcome(index))
        store.finish(DIGEST, "complete")
        assert tracker.finish() == SyncState(8, 0, None)
    check_complete(store)
    assert [(run.info.run_id, run.info.status) for run in runs()[0]] == [(first, "FINISHED")]


def test_the_parent_of_a_driver_that_is_gone_was_killed(store: Store) -> None:
    begin(store, trials(1))
    store.record(DIGEST, trials(1)[0].key, outcome(0))
    assert sync(store.path, DIGEST, None, "quick") == SyncState(1, 0, None)
    assert [run.info.status for run in runs()[0]] == ["KILLED"]


def test_a_tracker_told_to_stop_writes_what_there_is(store: Store) -> None:
    begin(store, trials(2))
    with store.lease(DIGEST):
        tracker = Tracker.start(store.path, DIGEST, None, "quick")
        tracker.wait_ready()
        store.record(DIGEST, trials(2)[0].key, outcome(0))
        os.kill(tracker.pid, signal.SIGINT)
        os.kill(tracker.pid, signal.SIGTERM)
        assert tracker._process.wait(10) == 0
        check_complete(store)
        # The next one goes on from there.
        store.record(DIGEST, trials(2)[1].key, outcome(1))
        store.finish(DIGEST, "complete")
        assert tracker.finish() == SyncState(2, 0, None)
    check_complete(store)


def test_a_deleted_experiment_is_refused_before_anything_runs(store: Store) -> None:
    client = _client()
    client.delete_experiment(client.create_experiment("quick"))
    begin(store, trials(1))
    tracker = Tracker.start(store.path, DIGEST, None, "quick")
    with pytest.raises(PlaceError, match=r"'quick' is in MLflow's trash; restore it"):
        tracker.wait_ready()
    assert not psutil.pid_exists(tracker.pid)


def test_doubles_are_mended(store: Store) -> None:
    from ringray.tracking_mlflow import Projection

    begin(store, trials(3))
    for index, trial in enumerate(trials(3)):
        store.record(DIGEST, trial.key, outcome(index))
    rows = store.trials(DIGEST)
    uri = place.resolve_uri(None)
    first, second = (Projection(store, DIGEST, uri, "quick", None) for _ in range(2))
    first.open()
    first.write(rows[0])
    second.open()
    second.run_id = second._create_parent()  # as if the answer to a first call had been lost
    second._children.clear()
    for each in rows:
        second.write(each)
    first.refresh()
    assert [first.write(each) for each in rows] == [False] * 3
    check_complete(store)


@pytest.mark.slow
def test_two_hundred_trials(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    (store.path.parent / "mlflow.db").unlink()
    planned = trials(200)
    begin(store, planned)
    spent = [_children_cpu()]
    begun = time.monotonic()
    tracker = Tracker.start(store.path, DIGEST, None, "quick")
    tracker.wait_ready()
    ready = time.monotonic() - begun
    cpu_ready = sum(psutil.Process(tracker.pid).cpu_times()[:2])
    for index, trial in enumerate(planned):
        store.record(DIGEST, trial.key, outcome(index))
    store.finish(DIGEST, "complete")
    begun = time.monotonic()
    assert tracker.finish(60) == SyncState(200, 0, None)
    wall = time.monotonic() - begun
    spent.append(_children_cpu())
    begun = time.monotonic()
    again = Tracker.start(store.path, DIGEST, None, "quick")
    again.wait_ready()
    ready_again = time.monotonic() - begun
    again.finish()
    check_complete(store)
    with capsys.disabled():
        print(
            f"\n  per trial {(spent[1] - spent[0] - cpu_ready) * 5:.1f} ms CPU, {wall * 5:.1f} ms "
            f"wall; ready after {ready:.1f} s on a new database ({cpu_ready:.1f} s CPU), "
            f"{ready_again:.1f} s with 200 children there"
        )


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# With a real server over HTTP


class Server:
    """An `mlflow server` on a private port that can be stopped and started again."""

    def __init__(self, folder: Path, schema: Path) -> None:
        self.port = _free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        (folder / "server.db").write_bytes(schema.read_bytes())
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1",
                    "--port", str(self.port), "--workers", "1",
                    "--backend-store-uri", f"sqlite:///{self._folder}/server.db",
                    "--artifacts-destination", str(self._folder / "files"),
                ],
                stdout=log, stderr=log, cwd=self._folder,
                env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
            )  # fmt: skip
        _wait_for(self._answers, 60)

    def stop(self) -> None:
        if self._process is None:
            return
        ours = psutil.Process(self._process.pid)
        for process in [ours, *ours.children(recursive=True)]:
            process.kill()
        self._process.wait()
        self._process = None

    def _answers(self) -> bool:
        try:
            place.check(self.uri)
        except PlaceError:
            return False
        return True


@pytest.fixture
def server(tmp_path: Path, schema: Path) -> Iterator[Server]:
    (tmp_path / "server").mkdir()
    found = Server(tmp_path / "server", schema)
    found.start()
    yield found
    found.stop()


@pytest.mark.slow
def test_a_server_that_goes_away_and_comes_back(
    store: Store, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = trials(40)
    begin(store, planned)
    tracker = Tracker.start(store.path, DIGEST, server.uri, "quick")
    tracker.wait_ready()
    assert tracker.ui_command == (
        f"{server.uri}/#/experiments/{tracker.experiment_id}/runs/{tracker.run_id}"
    )
    for index, trial in enumerate(planned[:20]):
        store.record(DIGEST, trial.key, outcome(index))
    begun = time.monotonic()
    _wait_for(lambda: len(runs(server.uri)[1]) >= 20, seconds=60, pause=1.0)
    seconds = time.monotonic() - begun
    server.stop()
    for index, trial in enumerate(planned[20:], start=20):
        store.record(DIGEST, trial.key, outcome(index))
    store.finish(DIGEST, "complete")
    begun = time.monotonic()
    state = tracker.finish(timeout=2.0)
    assert time.monotonic() - begun < 6
    assert state.pending == 20
    assert state.error
    assert "127.0.0.1" in state.error
    assert not psutil.pid_exists(tracker.pid)
    with pytest.raises(PlaceError, match="no MLflow server answers"):
        sync(store.path, DIGEST, server.uri, "quick")
    server.start()
    assert sync(store.path, DIGEST, server.uri, "quick") == SyncState(40, 0, None)
    assert sync(store.path, DIGEST, server.uri, "quick") == SyncState(40, 0, None)
    check_complete(store, server.uri)
    parents, _ = runs(server.uri)
    assert parents[0].info.status == "FINISHED"
    files = {file.path for file in _client(server.uri).list_artifacts(parents[0].info.run_id)}
    assert {"spec.yaml", "results.csv"} <= files
    with capsys.disabled():
        print(f"\n  over HTTP {seconds / 20 * 1e3:.0f} ms wall per trial")


@pytest.mark.slow
def test_an_outage_in_the_middle_is_caught_up(store: Store, server: Server) -> None:
    planned = trials(10)
    begin(store, planned)
    tracker = Tracker.start(store.path, DIGEST, server.uri, "quick")
    tracker.wait_ready()
    server.stop()
    for index, trial in enumerate(planned):
        store.record(DIGEST, trial.key, outcome(index))
    time.sleep(1.0)
    server.start()
    store.finish(DIGEST, "complete")
    assert tracker.finish() == SyncState(10, 0, None)
    check_complete(store, server.uri)
