"""A store whose sweeps are tracked in an MLflow database of the test's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ringray import tracked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ringray.store import Store


@pytest.fixture(scope="session")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tracked.make_schema(tmp_path_factory.mktemp("schema"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Path) -> Iterator[Store]:
    yield from tracked.opened(tmp_path, monkeypatch, schema)
