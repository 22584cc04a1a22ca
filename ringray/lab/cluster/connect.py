"""The connection to Ray: an embedded local one, or a cluster that runs already."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from ringray.base.deadline import within
from ringray.base.errors import PlaceError
from ringray.base.redaction import TOKENS
from ringray.lab.cluster import access, ray_private
from ringray.lab.cluster.capacity import of_nodes
from ringray.lab.cluster.fit import Cluster
from ringray.lab.cluster.watch import LOST_S, ClusterWatch

LOCAL_RANKS = 8  # ranks that share the cores of a machine without GPUs, if it has fewer cores
RANK_BYTES = 512 << 20  # resident memory of a rank before its first trial
START_S = 120.0  # seconds for a connection, or for an embedded Ray to start on a busy machine
CALL_S = 10.0  # seconds for one call of a connected Ray
GRACE_S = 5.0  # seconds for the processes of an embedded Ray to end after they were killed
PROBE_S = 5.0  # seconds for a cluster's address to answer
_SERVERS = ("gcs_server", "raylet")  # processes without which Ray does not work
# Ray replaces the loopback's address by one that others can reach, unless this is 0.
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def local_ranks() -> int:
    """Returns how many ranks the embedded Ray accepts: one per core and at least LOCAL_RANKS, if
    memory allows."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    by_memory = psutil.virtual_memory().available // RANK_BYTES
    return int(max(1, min(max(cores, LOCAL_RANKS), by_memory)))


def name(address: str | None) -> str:
    """Returns what ``connect(address)`` connects to, for messages."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    return "a local Ray" if address == "local" else f"Ray at {address}"


@contextlib.contextmanager
def connect(address: str | None) -> Iterator[Cluster]:
    """Connects to Ray at ``address`` (default: RAY_ADDRESS), or starts an embedded local Ray that
    ends with the block.

    Raises:
        PlaceError: no Ray answers at the address, or a local one cannot start.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    local = address in (None, "local")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray reports a dead worker on stdout even with log_to_driver=False, between our own lines
    # (--json - too); the ring reports the fault itself.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    # Ray also prints tracebacks of ranks that fail after another one failed.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    arguments: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with contextlib.ExitStack() as stack:
        if local:
            _authenticate()
            arguments |= stack.enter_context(_alone())
        else:
            access.use_given_token()
            _check_answers(str(address))
            arguments["address"] = address
        yield from _connected(address, arguments, local)


def _connected(address: str | None, arguments: dict[str, Any], local: bool) -> Iterator[Cluster]:
    import ray

    from ringray.lab.cluster import autoscaler

    def init() -> None:
        with _sigterm_blocked() if local else contextlib.nullcontext():
            ray.init(**arguments)

    started, ended, watch = _Started(), threading.Event(), None
    try:
        try:
            lives = started.live if local else None
            within(START_S, name(address), init, lives=lives, until=ended)
            present = of_nodes(within(CALL_S, name(address), ray.nodes))
        except Exception as error:  # of many types, ConnectionError and RuntimeError among them
            why = access.reason(error)
            raise PlaceError(f"cannot reach {name(address)}: {why}") from error
        finally:
            # Later children, as the tracker, are not this Ray's.
            started.look()
        if local:
            watch = ClusterWatch(name(address), started.servers_live, 0.0)
        else:
            watch = ClusterWatch(name(address), ray_private.cluster_lives(), LOST_S)
        yield Cluster(local, present, None if local else lambda: autoscaler.reach(present))
    finally:
        family = _with_descendants(list(started.names)) if local else []
        if local:
            ray_private.kill_without_grace()
        with contextlib.suppress(TimeoutError):
            within(CALL_S, f"the end of {name(address)}", ray.shutdown)
        ended.set()
        # ray.shutdown leaves what the raylet has started.
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        until = time.monotonic() + GRACE_S
        while any(map(_lives, family)) and time.monotonic() < until:
            time.sleep(0.01)
        if watch is not None:
            watch.end()


class _Started:
    """The processes of an embedded Ray: children of this one that it did not have before, with
    their names."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._others = self._me.children()
        self.names: dict[psutil.Process, str] = {}

    def look(self) -> None:
        """Notes the children that there are now."""
        for child in self._me.children():
            with contextlib.suppress(psutil.Error):
                if child not in self._others:
                    self.names[child] = child.name()

    def live(self) -> bool:
        """Looks, and tells whether the servers that were seen still run."""
        self.look()
        return self.servers_live()

    def servers_live(self) -> bool:
        """Tells whether the servers that were seen still run."""
        return all(_lives(one) for one, name in self.names.items() if name in _SERVERS)


@contextlib.contextmanager
def _sigterm_blocked() -> Iterator[None]:
    """Blocks SIGTERM for processes that are started in the block. A scheduler that stops a job
    sends it to all of its processes at once, and a driver without its Ray cannot end in order."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _alone() -> Iterator[dict[str, Any]]:
    """Yields the arguments with which an embedded Ray is closed to other users: it listens on the
    loopback alone, where Ray's default is all interfaces; and its sockets and logs lie in a folder
    of their own, where Ray's default under /tmp is open to every user of the machine. A folder that
    ``RAY_TMPDIR`` names is used as it is."""
    before = os.environ.get(_LOOPBACK)
    os.environ[_LOOPBACK] = "0"  # for the processes that Ray starts
    arguments: dict[str, Any] = {
        "address": "local",
        "num_cpus": local_ranks(),
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(ray_private.without_cluster())
            if "RAY_TMPDIR" not in os.environ:
                folder = tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True)
                # Within it: Ray opens its own folder to all. Short: sockets lie in it.
                arguments["_temp_dir"] = f"{stack.enter_context(folder)}/r"
            yield arguments
    finally:
        os.environ.pop(_LOOPBACK)
        if before is not None:
            os.environ[_LOOPBACK] = before


def _lives(process: psutil.Process) -> bool:
    """Returns whether a process runs; a killed one is a zombie until its parent collects it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _with_descendants(processes: list[psutil.Process]) -> list[psutil.Process]:
    family = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            family += process.children(recursive=True)
    return family


def _check_answers(address: str) -> None:
    """Raises PlaceError unless a Ray that accepts this process listens at HOST:PORT, or at the
    address that ``auto`` stands for: Ray itself would try for minutes."""
    if address.startswith(("http://", "https://")):
        raise PlaceError(
            f"{address} is a dashboard, which `ringray submit` takes; --address here is HOST:PORT "
            "of the cluster's GCS, by default port 6379"
        )
    if address == "auto":
        try:
            address = ray_private.found_address()
        except (OSError, ValueError) as error:  # none, or several
            raise PlaceError(f"--address auto: {access.reason(error)}") from None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # a word that Ray knows
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise PlaceError(
            f"no Ray answers at {address}: {error}; start one (`ray start --head`), or give no "
            "address to run on this machine alone"
        ) from None
    if not address.startswith("ray://"):
        access.check(address)


def _authenticate() -> None:
    """Restricts the Ray that this process starts to itself and its workers, by a token."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    access.check_token()
    if os.environ["RAY_AUTH_MODE"] == "token" and not any(map(os.environ.get, TOKENS)):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if "ray" in sys.modules:  # it looked at the mode when it was imported
        ray_private.reload_config()
