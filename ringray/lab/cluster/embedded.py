"""An embedded Ray: starts for one command, closed to other users, and ends with it.

On a busy machine a part of Ray may come later than another waits for it, and Ray ends. So it is
started again while there is time, each time in a fresh folder; Ray's logs of a failure are kept.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ringray.base import locks, private_files, provenance, signals
from ringray.base.deadline import say, within
from ringray.base.errors import ClusterError, PlaceError, reason_of
from ringray.base.redaction import TOKENS
from ringray.lab.cluster import access, ray_private

NAME = "a local Ray"
LOCAL_RANKS = 8  # ranks that share the cores of a machine without GPUs, if it has fewer cores
RANK_BYTES = 512 << 20  # resident memory of a rank before its first trial
START_S = 120.0  # seconds to start on a busy machine, all tries together
END_S = 10.0  # seconds for ``ray.shutdown``
LOCKED_S = 10.0  # beyond the time to start, after which the process is ended
TRIES = 3
LOGS = 5  # folders with the logs of failed starts that are kept
_SERVERS = ("gcs_server", "raylet")  # processes without which Ray does not work
_VARIABLES = {
    # Ray replaces the loopback's address by one that others can reach, unless this is 0.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray ends this process so many seconds after the end of a control plane that it called, also
    # after that of a failed start. The watch over a running one is sooner.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
}


def local_ranks() -> int:
    """Returns how many ranks the embedded Ray accepts: one per core and at least LOCAL_RANKS, if
    memory allows."""
    by_memory = min(psutil.virtual_memory().available, provenance.memory_bytes()) // RANK_BYTES
    return int(max(1, min(max(provenance.hardware()["cores"], LOCAL_RANKS), by_memory)))


@contextlib.contextmanager
def started() -> Iterator[Servers]:
    """Starts Ray and yields its servers; it ends with the block. Leaves variables of Ray behind.

    Raises:
        ClusterError: it did not start within START_S, or ended TRIES times.
        PlaceError: it has no folder to start in.
    """
    os.environ.update(_VARIABLES)
    _authenticate()
    until, attempt = time.monotonic() + START_S, 0
    servers: Servers | None = None
    with contextlib.ExitStack() as stack:
        while servers is None:
            attempt += 1
            try:
                servers = stack.enter_context(_once(until - time.monotonic()))
            except ClusterError as error:
                if attempt == TRIES or time.monotonic() >= until:
                    raise
                say(f"{error}; starting it again")
        yield servers


def _authenticate() -> None:
    """Restricts the Ray that this process starts to itself and its workers, by a token."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    access.check_token()
    if os.environ["RAY_AUTH_MODE"] == "token" and not any(map(os.environ.get, TOKENS)):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    ray_private.reload_config()


@contextlib.contextmanager
def _once(seconds: float) -> Iterator[Servers]:
    """Starts Ray in a folder of its own, which ends with what ``ray.shutdown`` leaves.

    Its sockets and logs lie in that folder, where Ray's default under /tmp is open to every user of
    the machine; a folder that ``RAY_TMPDIR`` names is used as it is.
    """
    with signals.blocked():  # also for the threads of what it imports
        import ray

    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(locks.temporary_folder(locks.RAY))
        except OSError as error:
            raise PlaceError(
                f"{NAME} cannot start: {error.filename}: {reason_of(error)}; free some space there"
            ) from error
        servers = Servers(folder)
        try:
            with signals.blocked():
                _start(servers, seconds, ended)
            yield servers
        finally:
            with signals.blocked():
                processes = locks.families(servers.names)  # before they lose their parents
                ray_private.kill_without_grace()
                with contextlib.suppress(TimeoutError):
                    within(END_S, f"the end of {NAME}", ray.shutdown)
                ended.set()
                servers.folder.clear(processes)


def _start(servers: Servers, seconds: float, ended: threading.Event) -> None:
    import ray

    # It listens on the loopback alone, where Ray's default is all interfaces.
    arguments = {"address": "local", "_node_ip_address": "127.0.0.1"}
    if "RAY_TMPDIR" not in os.environ:
        arguments["_temp_dir"] = str(servers.root)
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    init = functools.partial(ray.init, num_cpus=local_ranks(), **arguments, **quiet)

    def lives() -> bool:
        servers.look()
        return not servers.lost()

    # While a worker registers, Ray waits for an answer with the interpreter's lock held: no thread
    # of Python runs then. This one is not of Python.
    faulthandler.dump_traceback_later(seconds + LOCKED_S, exit=True, file=2)
    try:
        with ray_private.without_cluster(), ray_private.fixed_ports():
            within(seconds, NAME, init, lives=lives, until=ended)
    except Exception as error:  # of many types, ConnectionError and RuntimeError among them
        raise ClusterError(f"{NAME} cannot start: {servers.reason(reason_of(error))}") from error
    finally:
        faulthandler.cancel_dump_traceback_later()
        servers.look()  # later children, as the tracker, are not this Ray's


class Servers:
    """The processes of an embedded Ray: children of this one that it did not have before, with
    their names; and their logs."""

    def __init__(self, folder: locks.Folder) -> None:
        self.folder = folder
        self.root = folder.path / "r"  # within it: Ray opens its own folder to all
        if "RAY_TMPDIR" in os.environ:
            self.root = Path(os.environ["RAY_TMPDIR"], "ray")
        self._me = psutil.Process()
        self._others = self._me.children()
        self.names: dict[psutil.Process, str] = {}

    def look(self) -> None:
        """Notes the children that there are now."""
        for child in self._me.children():
            with contextlib.suppress(psutil.Error):
                if child not in self._others:
                    self.names[child] = child.name()

    def lost(self) -> str:
        """Returns which of the servers that were seen has ended, "" if none has."""
        for process, name in self.names.items():
            if name in _SERVERS and not locks.lives(process):
                return f"its {name} has ended"
        return ""

    def reason(self, otherwise: str = "") -> str:
        """Returns why it has ended or does not start, and where a copy of its logs is."""
        why = self.lost() or otherwise
        with contextlib.suppress(OSError, shutil.Error, PlaceError):
            logs = private_files.folder(private_files.create_home() / "logs")
            copy = logs / time.strftime(f"ray-%Y%m%d-%H%M%S-{os.getpid()}")
            latest = self.root / "session_latest" / "logs"
            shutil.copytree(latest, copy, symlinks=True, dirs_exist_ok=True)
            for old in sorted(logs.glob("ray-*"))[:-LOGS]:
                shutil.rmtree(old, ignore_errors=True)
            return f"{why}; Ray's logs are in {copy}"
        return why
