"""A store whose sweeps are tracked in an MLflow database of the test's own; a job server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringray.lab.cluster import head_command, job_package, job_server
from ringray.lab.cluster.job_package import Shipment
from ringray.lab.specs.model import Spec
from ringray.lab.store.store import Store
from tests.support import tracking_store
from tests.support.job_server import Server
from tests.support.small_spec import SMALL


@pytest.fixture(scope="session")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tracking_store.make_schema(tmp_path_factory.mktemp("schema"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Path) -> Iterator[Store]:
    yield from tracking_store.opened(tmp_path, monkeypatch, schema)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A job server that is made up, to which the spec is sent without the source."""

    @contextmanager
    def packed(spec: Spec | None = None) -> Iterator[Shipment]:
        folder = tmp_path / "sent" / "spec"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.yaml").write_text(spec.source if spec else "")
        yield Shipment(folder.parent, "spec/spec.yaml" if spec else "", 1 << 20)

    made = Server()
    monkeypatch.setattr(job_package, "packed", packed)
    monkeypatch.setattr(job_server, "connect", lambda url: made)
    monkeypatch.setattr(head_command, "POLL_S", 0.0)
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
