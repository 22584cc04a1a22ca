"""Real servers for tests: MLflow over HTTP, on sqlite or on a PostgreSQL of their own."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringray.base.errors import PlaceError
from ringray.lab.tracking import location as place
from tests.support.ray_heads import free_ports
from tests.support.tracking_store import wait_for


class Server:
    """An `mlflow server` on a private port that can be stopped and started again.

    ``database``: its backend store; ``workers``: its processes.
    """

    def __init__(self, folder: Path, database: str, workers: int = 1) -> None:
        self.port = free_ports(1)[0]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder, self.database, self._workers = folder, database, workers
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1",
                    "--port", str(self.port), "--workers", str(self._workers),
                    "--backend-store-uri", self.database,
                    "--artifacts-destination", str(self._folder / "files"),
                ],
                stdout=log, stderr=log, cwd=self._folder,
                env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
            )  # fmt: skip
        wait_for(self._answers, pause=0.1)

    @property
    def running(self) -> bool:
        return self._process is not None

    def stop(self) -> None:
        self._each(psutil.Process.kill)
        if self._process is not None:
            self._process.wait()
        self._process = None

    def hold(self) -> None:
        """It still listens, and answers nothing."""
        self._each(psutil.Process.suspend)

    def go_on(self) -> None:
        """After :meth:`hold`; nothing if it was not held."""
        self._each(psutil.Process.resume)

    def _each(self, call: Callable[[psutil.Process], None]) -> None:
        """Calls ``call`` with the server and all its descendants; one may end meanwhile."""
        if self._process is None:
            return
        ours = psutil.Process(self._process.pid)
        for process in (ours, *ours.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                call(process)

    def _answers(self) -> bool:
        log = self._folder / "server.log"
        assert self._process.poll() is None, f"it ended: {log.read_text()[-2000:]}"
        try:
            place.check(self.uri)
        except PlaceError:
            return False
        return True


def sqlite_server(folder: Path, schema: Path) -> Server:
    """A server, not yet started, on a copy of ``schema``."""
    folder.mkdir(exist_ok=True)
    (folder / "server.db").write_bytes(schema.read_bytes())
    return Server(folder, f"sqlite:///{folder}/server.db")


@contextmanager
def postgres() -> Iterator[str]:
    """The URI of an empty database in a PostgreSQL that lives as long as the context.

    Skips the test where no PostgreSQL server is installed, or no driver for it.
    """
    pytest.importorskip("psycopg", reason="no driver: pip install 'ringray[postgresql]'")
    tools = _postgres_tools()
    # Its server refuses to run as root, and pytest's folders are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="ringray-pg-"))
    user = _unprivileged()
    password = secrets.token_hex(16)
    (folder / "password").write_text(password)
    settings: dict[str, Any] = {}
    if user:
        for path in (folder, folder / "password"):
            shutil.chown(path, user)
        settings = {"user": user, "extra_groups": [], "group": pwd.getpwnam(user).pw_gid}
    port = free_ports(1)[0]
    data = str(folder / "data")
    server: subprocess.Popen[bytes] | None = None
    try:
        subprocess.run(
            [
                str(tools / "initdb"), "-D", data, "-U", "ringray", "--auth=scram-sha-256",
                f"--pwfile={folder / 'password'}", "--encoding=UTF8", "--locale=C", "--no-sync",
            ],
            check=True, capture_output=True, cwd=folder, **settings,
        )  # fmt: skip
        server = subprocess.Popen(
            [
                str(tools / "postgres"), "-D", data, "-p", str(port), "-h", "127.0.0.1",
                "-c", "unix_socket_directories=", "-c", "fsync=off",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, **settings,
        )  # fmt: skip
        uri = f"postgresql://ringray:{password}@127.0.0.1:{port}/postgres"
        wait_for(lambda: _accepts(uri), pause=0.1)
        yield uri
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)  # which does not wait for clients that stay connected
            server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _accepts(uri: str) -> bool:
    import psycopg

    try:
        psycopg.connect(uri).close()
    except psycopg.OperationalError:
        return False
    return True


def _postgres_tools() -> Path:
    """The folder of initdb and postgres: on the path, or where Debian keeps it."""
    for program in (
        shutil.which("initdb"),
        *sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")),
    ):
        if program and (Path(program).resolve().parent / "postgres").exists():
            return Path(program).resolve().parent
    pytest.skip("no PostgreSQL server on this machine (Debian: apt-get install postgresql)")


def _unprivileged() -> str | None:
    """Whom PostgreSQL runs as: None for ourselves, unless that is root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    pytest.skip("PostgreSQL refuses to run as root, and there is no other user")
