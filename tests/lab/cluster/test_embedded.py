"""An embedded Ray that does not start: its tries, its words, its logs and the environment."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ringray import lab
from ringray.base import locks
from ringray.base.errors import ClusterError
from ringray.lab.cluster import connect, embedded
from ringray.lab.cluster.embedded import TRIES, Servers
from tests.support.small_spec import SMALL

if TYPE_CHECKING:
    from collections.abc import Iterator

LATE = (
    "[2026-11-26 20:23:35,313 C 11 11] (raylet) node_manager.cc:3636:  An unexpected system state "
    "has occurred. You have likely discovered a bug in Ray. Please report this issue at "
    "https://x.org/issues and we'll work with you to fix it. Check failed: statussetor3636"
    ".has_value() Timed out waiting for file /tmp/x/agent_port\n*** StackTrace Information ***\n"
)
AGENT = (
    "[2026-11-26 20:35:01,666 E 11 12] (raylet) agent_manager.cc:87: The raylet exited immediately "
    "because one Ray agent failed, agent_name = runtime_env_agent.\n"
)
GONE = "[2026-11-26 20:35:01,700 C 9 9] (gcs_server) a.cc:1:  Check failed: bound Address in use\n"
SECRET = AGENT.replace("runtime_env_agent", "https://me:secret@host")
NOTED = (
    "[2026-11-26 20:35:01,700 I 9 9] (raylet) a.cc:1: all is well\n[x W 9 9] (raylet) b.cc:2: hm\n"
)


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """The servers of a Ray whose folder is made, and nothing started."""
    monkeypatch.setenv("RINGRAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    return Servers(locks.Folder(tmp_path, tmp_path / "note.json"))


def log(servers: Servers, raylet: str, gcs_server: str = "", session: str = "2026") -> Path:
    folder = servers.root / f"session_{session}_{os.getpid()}" / "logs"
    folder.mkdir(parents=True)
    (folder / "raylet.err").write_text(raylet)
    (folder / "gcs_server.err").write_text(gcs_server)
    return folder


@pytest.mark.parametrize(
    ("raylet", "gcs_server", "why"),
    [
        (LATE, "", "Timed out waiting for file /tmp/x/agent_port"),
        (AGENT, "", "The raylet exited immediately because one Ray agent failed"),
        (AGENT + LATE, "", "Timed out waiting"),
        (AGENT, GONE, "Address in use"),
        (SECRET, "", "agent_name = https://***@host"),
        ("\x1b[31m\xff" + NOTED, "", "no answer in 3 s"),
        ("", "", "no answer in 3 s"),
    ],
)
def test_the_reason_is_the_fault_in_rays_log(
    raylet: str, gcs_server: str, why: str, servers: Servers
) -> None:
    folder = log(servers, raylet, gcs_server)
    reason, _, logs = servers.reason("no answer in 3 s").partition("; Ray's logs are in ")
    assert why in reason
    assert "secret" not in reason
    assert "bug in Ray" not in reason
    assert Path(logs, "raylet.err").read_text() == (folder / "raylet.err").read_text()


def test_a_ray_without_logs_has_a_reason(servers: Servers) -> None:
    assert servers.reason("no answer in 3 s") == "no answer in 3 s"


def test_the_logs_of_the_last_failures_are_kept(servers: Servers, tmp_path: Path) -> None:
    log(servers, LATE)
    home = tmp_path / "home" / "logs"
    for day in range(8):
        (home / f"ray-2025010{day}-000000-1").mkdir(parents=True)
    servers.reason()
    logs = sorted(path.name for path in home.iterdir())
    assert len(logs) == embedded.LOGS
    assert not logs[-1].startswith("ray-2025")


def test_logs_of_another_start_say_nothing(servers: Servers) -> None:
    log(servers, LATE)
    assert Servers(servers.folder).reason("no answer") == "no answer"


@pytest.mark.parametrize("failures", range(TRIES + 1))
def test_a_start_that_fails_is_tried_again(
    failures: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While there is time; each try has what is left of it."""
    seconds: list[float] = []

    @contextlib.contextmanager
    def once(left: float) -> Iterator[str]:
        seconds.append(left)
        if len(seconds) <= failures:
            raise ClusterError("a local Ray cannot start: so it is")
        yield "servers"

    monkeypatch.setattr(embedded, "_once", once)
    with contextlib.ExitStack() as stack:
        stack.enter_context(connect._variables())
        if failures == TRIES:
            with pytest.raises(ClusterError, match="so it is"):
                stack.enter_context(embedded.started())
        else:
            assert str(stack.enter_context(embedded.started())) == "servers"
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] <= embedded.START_S
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(seconds) - 1 == min(failures, TRIES - 1)
    assert all(line.endswith("so it is; starting it again") for line in told)


def test_a_start_that_takes_all_the_time_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def once(left: float) -> Any:
        tries.append(left)
        raise ClusterError("late")

    monkeypatch.setattr(embedded, "_once", once)
    monkeypatch.setattr(embedded, "START_S", 0.0)
    with connect._variables(), pytest.raises(ClusterError, match="late"), embedded.started():
        pass
    assert len(tries) == 1


def test_the_ports_of_agents_are_free_and_held() -> None:
    """Nobody else gets them, and the agent can listen there; Ray's functions are put back."""
    import socket

    from ray._private import parameter, ray_constants, services

    from ringray.lab.cluster import ray_private

    before = parameter.RayParams, services.start_ray_process
    with ray_private.fixed_ports():
        made: Any = parameter.RayParams(metrics_export_port=None, num_cpus=1)
        ports = {getattr(made, name) for name in ray_private._AGENT_PORTS}
        assert made.num_cpus == 1
        assert len(ports) == 4
        for port in ports:
            with pytest.raises(OSError, match="in use"), socket.socket() as other:
                other.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)):
                pass
        assert services.start_ray_process is not before[1]
        assert ray_constants.PROCESS_TYPE_RAYLET
    assert (parameter.RayParams, services.start_ray_process) == before


def dirty(**_: Any) -> None:
    """Variables that Ray sets in the environment while it starts."""
    os.environ["PYTHONBREAKPOINT"] = os.environ["RAY_OF_ITS_OWN"] = "x"
    os.environ.pop("RAY_SOMETHING", None)


def fails(**_: Any) -> None:
    dirty()
    raise RuntimeError("no luck")


@pytest.mark.parametrize("init", [dirty, fails])
@pytest.mark.parametrize("way", [*lab.__all__, "connect"])
def test_the_environment_is_as_before(
    init: Any, way: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After everything public that starts a local Ray, whatever comes of it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_SOMETHING", "of the user")
    starts: list[bool] = []
    monkeypatch.setattr("ray.init", lambda **given: starts.append(True) or init(**given))
    monkeypatch.setattr("ray.nodes", list)
    before = dict(os.environ)
    with contextlib.suppress(Exception):  # there is no Ray
        if way == "connect":
            with connect.connect(None):
                assert os.environ["RAY_OF_ITS_OWN"] == "x"
        else:
            getattr(lab, way)(SMALL)
    assert dict(os.environ) == before
    assert starts or way == "results"
