"""Every command that speaks to a server, and servers that are silent, slow, or something else."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import pytest

from ringray.base import deadline
from ringray.lab import cli
from ringray.lab.cluster import access, connect, job_server
from ringray.lab.store.store import Store
from ringray.lab.tracking import location, restore, tracker
from tests.support.bad_servers import SAID, bad_server
from tests.support.small_spec import SMALL
from tests.support.tracking_store import begin, trials

if TYPE_CHECKING:
    from pathlib import Path

RAY = b'{"version": "4", "ray_version": "2.50.0", "ray_commit": "x", "session_name": "y"}'
PATIENCE_S = 600.0  # seconds; only reached when something hangs


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


def check_ends(
    arguments: list[str], capsys: pytest.CaptureFixture[str], *, place: str, within: float = 0.0
) -> str:
    """The command ends with 2 and one line that names the place; returns the line."""
    began = time.monotonic()
    assert cli.main(arguments) == 2
    took = time.monotonic() - began
    assert took < (within or PATIENCE_S)
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("ringray: error: "), err
    assert place in err[-1], err
    assert not [line for line in err if line.startswith(("Traceback", "  File"))]
    print(f"{' '.join(arguments[:1])}: {took:.1f} s: {err[-1][:160]}")
    return err[-1]


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize("command", ["run", "sync", "resume"])
def test_a_tracking_server(
    command: str,
    kind: str,
    small: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if kind in ("endless-body", "deep", "other-json"):
        pytest.skip("a server that answers /health is tried")
    with Store(tmp_path / "store.db") as store:
        begin(store, trials(2))
    with bad_server(kind) as port:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        given = {"run": [small], "sync": ["quick"], "resume": ["quick", "--from-mlflow"]}[command]
        said = check_ends([command, *given], capsys, place=str(port))
    assert "no MLflow server answers" in said


@pytest.mark.parametrize("kind", SAID)
@pytest.mark.parametrize("probed", [False, True], ids=["at-once", "later"])
@pytest.mark.parametrize("command", ["submit", "stop"])
def test_a_job_server(
    command: str, probed: bool, kind: str, small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with bad_server(kind, {"/api/version": RAY} if probed else None) as port:
        url = f"http://127.0.0.1:{port}"
        check_ends([command, small, "--address", url], capsys, place=url)


@pytest.mark.parametrize("kind", SAID)
def test_a_control_plane(
    kind: str, small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with bad_server(kind) as port:
        given = ["run", small, "--no-tracking", "--address", f"127.0.0.1:{port}"]
        said = check_ends(given, capsys, place=str(port))
    assert "is not Ray" in said or "no Ray answers" in said


def test_no_ray_on_this_machine(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr("ray._private.services.get_ray_address_from_environment", none)
    check_ends(["run", small, "--no-tracking", "--address", "auto"], capsys, place="auto")


def test_the_address_of_a_ray_that_has_ended(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ray._private.services.get_ray_address_from_environment", lambda *_: "127.0.0.1:9"
    )
    check_ends(["run", small, "--no-tracking", "--address", "auto"], capsys, place="127.0.0.1:9")


def test_a_ray_that_does_not_start(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "START_S", 0.1)
    monkeypatch.setattr(connect, "_check_answers", lambda address: None)
    monkeypatch.setattr("ray.init", lambda **_: time.sleep(3))
    given = ["run", small, "--no-tracking", "--address", "127.0.0.1:9"]
    assert "no answer in 0.1 s" in check_ends(given, capsys, place="127.0.0.1:9")


def test_a_clock_of_long_ago(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect.time, "time", lambda: 95374007.5)
    check_ends(["run", small, "--no-tracking"], capsys, place="1973-01-08")


def test_a_machine_without_a_network(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(connect.socket, "create_connection", none)
    check_ends(["run", small, "--no-tracking"], capsys, place="127.0.0.1: network is unreachable")
