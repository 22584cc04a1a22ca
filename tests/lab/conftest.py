"""A store whose sweeps are tracked in an MLflow database of the test's own; a job server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ringray.lab.cluster import job_server, jobs
from tests.support import tracking_store
from tests.support.job_server import Server
from tests.support.small_spec import SMALL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ringray.lab.store.store import Store


@pytest.fixture(scope="session")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tracking_store.make_schema(tmp_path_factory.mktemp("schema"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Path) -> Iterator[Store]:
    yield from tracking_store.opened(tmp_path, monkeypatch, schema)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setattr(job_server, "connect", lambda url: made)
    monkeypatch.setattr(jobs, "POLL_S", 0.0)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return str(path)
