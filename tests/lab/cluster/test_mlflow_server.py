"""cluster/mlflow/server.sh, which is the server of both deployments: on a real PostgreSQL, with
users, and with a sweep that is tracked there."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.place import REPOSITORY, Place, tiny
from tests.support.ray_heads import free_ports
from tests.support.tracking_servers import postgres
from tests.support.tracking_store import wait_for

FOLDER = REPOSITORY / "cluster" / "mlflow"
PASSWORDS = {"admin": "an admin's password", "session": "a key of sessions"}

pytestmark = pytest.mark.exhaustive


def status(url: str, host: str | None = None) -> int:
    """Returns the code of an answer; 0 if there is none."""
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of the server, its artifacts in ``tmp_path/artifacts``."""
    pytest.importorskip("flask_wtf", reason="MLflow's users need it: pip install flask-wtf")
    port, secrets = free_ports(1)[0], tmp_path / "secrets"
    with postgres() as uri:
        user, _, place = uri.removeprefix("postgresql://").rpartition("@")
        name, _, password = user.partition(":")
        database = f"postgresql+psycopg://{name}@{place}"
        secrets.mkdir()
        for file, text in {**PASSWORDS, "postgres": password}.items():
            (secrets / file).write_text(f"{text}\n")
        auth = (FOLDER / "auth.ini").read_text()
        assert "postgresql+psycopg://mlflow@postgres/mlflow" in auth
        config = tmp_path / "auth.ini"
        config.write_text(auth.replace("postgresql+psycopg://mlflow@postgres/mlflow", database))
        log = tmp_path / "server.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["sh", str(FOLDER / "server.sh")], stdout=file, stderr=file, cwd=tmp_path,
                env=os.environ | {
                    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                    "BIND": "127.0.0.1", "PORT": str(port), "SECRETS": str(secrets),
                    "DATABASE": database, "AUTH_CONFIG": str(config),
                    "ARTIFACTS": str(tmp_path / "artifacts"),
                    "HOSTS": f"127.0.0.1:{port}", "WORKERS": "1",
                },
            )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            wait_for(
                lambda: status(f"{url}/health") == 200 or process.poll() is not None, pause=0.5
            )
            assert process.poll() is None, log.read_text()
            yield url
        finally:
            print(log.read_text()[-3000:])
            ours = psutil.Process(process.pid)
            for one in [ours, *ours.children(recursive=True)]:
                one.kill()
            process.wait()


def test_a_sweep_is_tracked_by_a_user_alone(server: str, place: Place, tmp_path: Path) -> None:
    assert status(f"{server}/") == 401
    assert status(f"{server}/", host="elsewhere.example.org") == 403
    spec = place.spec(tiny("team", size=1))
    place.variables["MLFLOW_TRACKING_URI"] = server
    place.variables |= {
        "MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": PASSWORDS["admin"],
    }  # fmt: skip
    done = place.run("run", spec)
    assert done.code == 0, done.err
    assert "sync" not in done.out, "something was not written"
    assert list((tmp_path / "artifacts").rglob("results.csv"))  # which the server wrote
