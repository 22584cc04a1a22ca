"""A tracking server that misbehaves: the sweep goes on, and nothing is missing or double later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.store.store import Store
from ringray.lab.tracking import location
from ringray.lab.tracking import tracker as tracking
from ringray.lab.tracking.tracker import Tracker, sync
from ringray.lab.trial.outcome import SyncState
from tests.support.exhaustive import exhaustive
from tests.support.fault_proxy import FAULTS, Proxy
from tests.support.place import PATIENCE
from tests.support.tracking_servers import Server, sqlite_server
from tests.support.tracking_store import (
    DIGEST,
    begin,
    check_complete,
    outcome,
    runs,
    trials,
    wait_for,
)

COUNT = 6
pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, schema: Path) -> Iterator[Server]:
    found = sqlite_server(tmp_path_factory.mktemp("server"), schema)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    made = Proxy(server.uri)
    yield made
    made.close()


def _record(store: Store, indices: range) -> None:
    for index in indices:
        store.record(DIGEST, trials(COUNT)[index].key, outcome(index))


# What the server did and did not answer.
@pytest.mark.parametrize("fault", ["lost", *exhaustive(*sorted({*FAULTS} - {"lost"}))])
def test_in_the_middle(store: Store, server: Server, proxy: Proxy, fault: str) -> None:
    name = f"middle-{fault}"
    begin(store, trials(COUNT))
    with store.lease(DIGEST):
        tracker = Tracker(store.path, DIGEST, proxy.uri, name).start()
        tracker.wait_ready()
        _record(store, range(2))
        wait_for(lambda: len(runs(server.uri, name)[1]) == 2, pause=0.5)
        # Of the calls that write the next trials; a late answer holds up its caller for 10 s.
        proxy.fail(fault, only=2 if fault == "late" else 7)
        _record(store, range(2, COUNT))
        wait_for(lambda: proxy.met >= (2 if fault == "late" else 7), pause=0.1)
        store.finish(DIGEST, "complete")
        assert tracker.finish(PATIENCE) == SyncState(COUNT, 0, None)
    check_complete(store, server.uri, name)
    (parent,), _ = runs(server.uri, name)
    assert parent.info.status == "FINISHED"
    # The answer that came late was that of a call which had been made again.
    proxy.delay.set()
    assert sync(store.path, DIGEST, server.uri, name) == SyncState(COUNT, 0, None)
    check_complete(store, server.uri, name)


@pytest.mark.parametrize("fault", ["500", *exhaustive(*sorted({*FAULTS} - {"500"}))])
def test_at_the_start(
    store: Store, server: Server, proxy: Proxy, fault: str, monkeypatch: pytest.MonkeyPatch
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
    assert tracking.settled(store, DIGEST, server.uri) is None
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
    check_complete(store, server.uri, name)
