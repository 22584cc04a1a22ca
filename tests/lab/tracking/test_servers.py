"""The same projection on every database of an `mlflow server`, which may misbehave meanwhile."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.store.store import Store
from ringray.lab.tracking import location
from ringray.lab.tracking import tracker as tracking
from ringray.lab.tracking.tracker import Tracker, sync
from ringray.lab.trial.outcome import Outcome, SyncState
from tests.support.exhaustive import exhaustive
from tests.support.fault_proxy import FAULTS, Proxy
from tests.support.place import PATIENCE
from tests.support.tracking_servers import Server, postgres, sqlite_server
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

COUNT = 6  # trials whose server misbehaves


@pytest.fixture(params=["sqlite", *exhaustive("postgresql")])
def server(request: pytest.FixtureRequest, tmp_path: Path, schema: Path) -> Iterator[Server]:
    folder = tmp_path / "server"
    if request.param == "sqlite":
        found = sqlite_server(folder, schema)
        found.start()
        yield found
        found.stop()
        return
    folder.mkdir()
    with postgres() as uri:
        found = Server(folder, uri)
        found.start()
        yield found
        found.stop()


def measured(index: int, shift: float = 0.0) -> Outcome:
    """An outcome with what the figures and MLflow's sections need."""
    base = outcome(index, shift=shift)
    metrics = dict(base.metrics) | {
        "p20_ms": index + 0.5, "p80_ms": index + 1.5, "baseline_ms": 2.0,
        "peak_memory_bytes": (index + 1) * 2.0**20, "cpu_percent": 97.0,
    }  # fmt: skip
    return Outcome(
        "ok", None, metrics, base.samples, base.point, 1, base.started, base.ended
    )  # fmt: skip


@pytest.mark.slow
def test_a_sweep_over_http(store: Store, server: Server) -> None:
    planned = trials(24, pruned=(23,))
    begin(store, planned)
    tracker = Tracker(store.path, DIGEST, server.uri, "quick", request_s=PATIENCE).start()
    tracker.wait_ready(PATIENCE)
    for index, trial in enumerate(planned[:-1]):
        store.record(DIGEST, trial.key, measured(index))
    store.finish(DIGEST, "complete")
    assert tracker.finish(PATIENCE) == SyncState(24, 0, None)
    check_complete(store, server.uri)

    mlflow = client(server.uri)
    (parent,), children = runs(server.uri)
    run_id = parent.info.run_id
    assert parent.info.status == "FINISHED"
    files = {file.path for file in mlflow.list_artifacts(run_id)}
    assert files == {
        "spec.yaml", "results.csv", "figures", "report.html", "trials.jsonl",
    }  # fmt: skip
    figures = {file.path for file in mlflow.list_artifacts(run_id, "figures")}
    assert figures == {
        f"figures/{name}.png" for name in ("throughput", "memory", "speedup", "pareto")
    }
    # What the description shows is served under the address that it names.
    note = parent.data.tags["mlflow.note.content"]
    for path in figures:
        address = f"get-artifact?path={quote(path, safe='')}&run_uuid={run_id}"
        assert address in note
        with urllib.request.urlopen(f"{server.uri}/{address}") as answer:
            assert answer.headers["Content-Type"] == "image/png"
            assert answer.read(8) == b"\x89PNG\r\n\x1a\n"
    assert len(mlflow_text(server, run_id, "results.csv").splitlines()) == 1 + 24

    # The searches of docs/mlflow.md: numbers are compared as numbers, and machines are told apart.
    found = mlflow.search_runs(
        [parent.info.experiment_id],
        "tags.`ringray.role` = 'trial' AND metrics.median_ms < 10 AND params.partition = 'zigzag'",
        order_by=["metrics.median_ms DESC"],
    )
    assert [run.data.metrics["median_ms"] for run in found] == [7.0, 3.0]
    assert found[0].data.metrics["system/cpu_percent"] == 97.0
    assert found[0].data.tags["hardware.cpu"] == "AMD"

    # Measured again and synchronised: the new numbers, nothing twice, figures of now.
    store.record(DIGEST, planned[0].key, measured(0, shift=500.0))
    assert sync(store.path, DIGEST, server.uri, "quick") == SyncState(24, 0, None)
    check_complete(store, server.uri)
    assert runs(server.uri)[1][planned[0].key].data.metrics["median_ms"] == 501.0
    assert runs(server.uri)[1][planned[1].key].info.run_id == children[planned[1].key].info.run_id

    # The server goes away during a sweep, and comes back.
    settled = tracking.settled(store, DIGEST, server.uri)
    assert settled is not None
    tracker = Tracker(store.path, DIGEST, server.uri, "quick", settled).start()
    tracker.wait_ready()
    server.stop()
    for index in range(4):
        store.record(DIGEST, planned[index].key, measured(index, shift=900.0))
    store.finish(DIGEST, "complete")
    state = tracker.finish(PATIENCE)  # only failures: it is given up sooner
    assert state.pending >= 4  # it had perhaps not yet asked what the server holds
    assert "127.0.0.1" in str(state.error)
    with pytest.raises(PlaceError, match="no MLflow server answers"):
        sync(store.path, DIGEST, server.uri, "quick")
    server.start()
    assert sync(store.path, DIGEST, server.uri, "quick") == SyncState(24, 0, None)
    check_complete(store, server.uri)


def mlflow_text(server: Server, run_id: str, path: str) -> str:
    address = f"{server.uri}/get-artifact?path={quote(path)}&run_uuid={run_id}"
    with urllib.request.urlopen(address) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.exhaustive
def test_a_database_without_a_server(store: Store) -> None:
    """PostgreSQL named as the tracking place itself, as `tracking.uri` may."""
    with postgres() as uri:
        begin(store, trials(2))
        store.record(DIGEST, trials(2)[0].key, measured(0))
        assert sync(store.path, DIGEST, uri, "quick").pending == 0
        (parent,), children = runs(uri)
        assert len(children) == 1
        assert parent.data.metrics["trials_ok"] == 1.0


# A server that misbehaves


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, schema: Path) -> Iterator[Server]:
    server = sqlite_server(tmp_path_factory.mktemp("server"), schema)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def proxy(good: Server) -> Iterator[Proxy]:
    made = Proxy(good.uri)
    yield made
    made.close()


def _record(store: Store, indices: range) -> None:
    for index in indices:
        store.record(DIGEST, trials(COUNT)[index].key, outcome(index))


# What the server did and did not answer.
@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["lost", *exhaustive(*sorted({*FAULTS} - {"lost"}))])
def test_in_the_middle(store: Store, good: Server, proxy: Proxy, fault: str) -> None:
    name = f"middle-{fault}"
    begin(store, trials(COUNT))
    with store.lease(DIGEST):
        tracker = Tracker(store.path, DIGEST, proxy.uri, name).start()
        tracker.wait_ready()
        _record(store, range(2))
        wait_for(lambda: len(runs(good.uri, name)[1]) == 2, pause=0.5)
        # Of the calls that write the next trials; a late answer holds up its caller for 10 s.
        proxy.fail(fault, only=2 if fault == "late" else 7)
        _record(store, range(2, COUNT))
        wait_for(lambda: proxy.met >= (2 if fault == "late" else 7), pause=0.1)
        store.finish(DIGEST, "complete")
        assert tracker.finish(PATIENCE) == SyncState(COUNT, 0, None)
    check_complete(store, good.uri, name)
    (parent,), _ = runs(good.uri, name)
    assert parent.info.status == "FINISHED"
    # The answer that came late was that of a call which had been made again.
    proxy.delay.set()
    assert sync(store.path, DIGEST, good.uri, name) == SyncState(COUNT, 0, None)
    check_complete(store, good.uri, name)


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["500", *exhaustive(*sorted({*FAULTS} - {"500"}))])
def test_at_the_start(
    store: Store, good: Server, proxy: Proxy, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location, "PROBE_S", 0.5)
    name = f"start-{fault}"
    begin(store, trials(COUNT))
    proxy.fail(fault)
    # A sweep that nobody has taken yet: told before anything starts.
    if fault in ("500", "reset", "lost", "late"):
        with pytest.raises(PlaceError, match="no MLflow server answers"):
            Tracker(store.path, DIGEST, proxy.uri, name).start()
    else:
        with pytest.raises(PlaceError, match="cannot be used"):
            Tracker(store.path, DIGEST, proxy.uri, name).start().wait_ready()
    assert tracking.settled(store, DIGEST, proxy.uri) is None
    proxy.fail(None)
    with store.lease(DIGEST):
        first = Tracker(store.path, DIGEST, proxy.uri, name).start()
        first.wait_ready()
        _record(store, range(2))
        store.finish(DIGEST, "interrupted")
        assert first.finish(PATIENCE) == SyncState(2, 0, None)
    # One that was taken there before goes on, and is written when the server is back.
    settled = tracking.settled(store, DIGEST, proxy.uri)
    assert settled is not None
    assert tracking.settled(store, DIGEST, good.uri) is None
    proxy.fail(fault)
    begin(store, trials(COUNT))
    with store.lease(DIGEST):
        tracker = Tracker(store.path, DIGEST, proxy.uri, name, settled=settled).start()
        tracker.wait_ready()
        assert tracker.place.run_id == first.place.run_id
        _record(store, range(2, COUNT))
        wait_for(lambda: proxy.met > 0)
        proxy.fail(None)
        proxy.delay.set()
        store.finish(DIGEST, "complete")
        assert tracker.finish(PATIENCE) == SyncState(COUNT, 0, None)
    check_complete(store, good.uri, name)
