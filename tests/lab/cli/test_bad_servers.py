"""Every command that speaks to a server, and servers that are silent, slow, or something else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ringray.base import deadline
from ringray.lab import cli
from ringray.lab.cluster import access, connect, job_server
from ringray.lab.store.store import Store
from ringray.lab.tracking import location, restore, tracker
from tests.support.bad_servers import bad_server
from tests.support.small_spec import SMALL
from tests.support.tracking_store import begin, trials

RAY = {"/api/version": b'{"version": "4", "ray_version": "2.50.0", "ray_commit": "x"}'}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Deadlines of a test, and a home with a sweep in its store."""
    monkeypatch.setattr(location, "PROBE_S", 0.4)
    monkeypatch.setattr(tracker, "UNHURRIED_S", 0.4)
    monkeypatch.setattr(restore, "UNHURRIED_S", 0.4)
    monkeypatch.setattr(job_server, "PROBE_S", 0.4)
    monkeypatch.setattr(job_server, "CALL_S", 0.4)
    monkeypatch.setattr(access, "CALL_S", 0.4)
    monkeypatch.setattr(deadline, "_left", [])
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.replace("enabled: false", "enabled: true"))
    return str(path)


def check_ends(capsys: pytest.CaptureFixture[str], place: str, *arguments: str) -> str:
    """The command ends with 2 and one line that names the place; returns the line."""
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("ringray: error: "), err
    assert place in err[-1], err
    assert not [line for line in err if line.startswith(("Traceback", "  File"))]
    return err[-1]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("silent", ["run", "SPEC"]),
        ("silent", ["sync", "quick"]),
        ("garbage", ["resume", "quick", "--from-mlflow"]),
    ],
)
def test_a_tracking_server(
    kind: str, arguments: list[str], small: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with Store(tmp_path / "store.db") as store:
        begin(store, trials(2))
    words = [word.replace("SPEC", small) for word in arguments]
    with bad_server(kind) as port:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        assert "no MLflow server answers" in check_ends(capsys, str(port), *words)


@pytest.mark.parametrize(
    ("kind", "answers"),
    [(kind, answers) for kind in ("silent", "garbage", "other-json") for answers in ({}, RAY)],
)
def test_a_job_server(
    kind: str, answers: dict[str, bytes], small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first answer on, or after it."""
    with bad_server(kind, answers) as port:
        url = f"http://127.0.0.1:{port}"
        check_ends(capsys, url, "submit", small, "--address", url)


@pytest.mark.parametrize("kind", ["silent", "garbage"])
def test_a_control_plane(kind: str, small: str, capsys: pytest.CaptureFixture[str]) -> None:
    with bad_server(kind) as port:
        address = f"127.0.0.1:{port}"
        message = check_ends(capsys, str(port), "run", small, "--no-tracking", "--address", address)
    assert "no Ray answers" in message


def test_a_ray_that_does_not_start(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(connect, "START_S", 0.1)
    monkeypatch.setattr(connect, "_check_answers", lambda address: None)
    monkeypatch.setattr("ray.init", lambda **_: ended.wait())
    line = ["run", small, "--no-tracking", "--address", "127.0.0.1:9"]
    assert "no answer in 0.1 s" in check_ends(capsys, "127.0.0.1:9", *line)
    ended.set()
