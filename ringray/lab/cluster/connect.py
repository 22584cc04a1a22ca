"""The connection to Ray: an embedded local one, or a cluster that runs already."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from ringray.base import leftovers, provenance, signals
from ringray.base.deadline import within
from ringray.base.errors import PlaceError, reason_of
from ringray.base.redaction import TOKENS
from ringray.lab.cluster import access, ray_private
from ringray.lab.cluster.capacity import of_nodes
from ringray.lab.cluster.fit import Cluster
from ringray.lab.cluster.watch import LOST_S, ClusterWatch

LOCAL_RANKS = 8  # ranks that share the cores of a machine without GPUs, if it has fewer cores
RANK_BYTES = 512 << 20  # resident memory of a rank before its first trial
START_S = 120.0  # seconds for a connection, or for an embedded Ray to start on a busy machine
CALL_S = 10.0  # seconds for one call of a connected Ray
PROBE_S = 5.0  # seconds for a cluster's address to answer
_PAST = 1_700_000_000  # seconds since 1970; November 2023
_SERVERS = ("gcs_server", "raylet")  # processes without which Ray does not work
# Ray replaces the loopback's address by one that others can reach, unless this is 0.
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def local_ranks() -> int:
    """Returns how many ranks the embedded Ray accepts: one per core and at least LOCAL_RANKS, if
    memory allows."""
    by_memory = psutil.virtual_memory().available // RANK_BYTES
    return int(max(1, min(max(provenance.hardware()["cores"], LOCAL_RANKS), by_memory)))


def target(address: str | None) -> str:
    """Returns the address to which ``connect(address)`` connects; "local" is an embedded Ray."""
    return address or os.environ.get("RAY_ADDRESS") or "local"


def name(address: str | None) -> str:
    """Returns what ``connect(address)`` connects to, for messages."""
    address = target(address)
    return "a local Ray" if address == "local" else f"Ray at {address}"


@contextlib.contextmanager
def connect(address: str | None) -> Iterator[Cluster]:
    """Connects to Ray at ``address`` (default: RAY_ADDRESS), or starts an embedded local Ray that
    ends with the block.

    Raises:
        PlaceError: no Ray answers at the address, or a local one cannot start.
    """
    address = target(address)
    local = address == "local"
    # Ray's waits end by this clock, and certificates are checked by it.
    if (now := time.time()) < _PAST:
        today = time.strftime("%Y-%m-%d", time.gmtime(now))
        raise PlaceError(f"the clock of this machine says {today}; set it to the present time")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray reports a dead worker on stdout even with log_to_driver=False, between our own lines
    # (--json - too); the ring reports the fault itself.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    # Ray also prints tracebacks of ranks that fail after another one failed.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    arguments: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    folder = None
    with contextlib.ExitStack() as stack:
        if local:
            _check_loopback()
            _authenticate()
            folder = _folder(stack)
            arguments |= stack.enter_context(_alone(folder.path))
        else:
            access.use_given_token()
            _check_answers(address)
            arguments["address"] = address
        yield from _connected(address, arguments, folder)


def _connected(
    address: str | None, arguments: dict[str, Any], folder: leftovers.Folder | None
) -> Iterator[Cluster]:
    """Connects; a local Ray has a folder, whose end ends what ``ray.shutdown`` leaves."""
    with signals.blocked():  # also for the threads of what it imports
        import ray

        from ringray.lab.cluster import autoscaler
    started, ended, watch = _Started(folder), threading.Event(), None
    try:
        try:
            lives = started.live if folder else None
            with signals.blocked():
                init = functools.partial(ray.init, **arguments)
                within(START_S, name(address), init, lives=lives, until=ended)
            present = of_nodes(within(CALL_S, name(address), ray.nodes))
        except Exception as error:  # of many types, ConnectionError and RuntimeError among them
            why = access.reason(error)
            raise PlaceError(f"cannot reach {name(address)}: {why}") from error
        finally:
            # Later children, as the tracker, are not this Ray's.
            started.look()
        if folder is not None:
            watch = ClusterWatch(name(address), started.servers_live, 0.0)
        else:
            watch = ClusterWatch(name(address), ray_private.cluster_lives(), LOST_S)
        local = folder is not None
        yield Cluster(local, present, None if local else lambda: autoscaler.reach(present))
    finally:
        with signals.blocked():
            try:
                if watch is not None:
                    watch.end()
            finally:
                if folder is not None:
                    folder.add(folder.processes())
                    ray_private.kill_without_grace()
                with contextlib.suppress(TimeoutError):
                    within(CALL_S, f"the end of {name(address)}", ray.shutdown)
                ended.set()
                if folder is not None:  # ray.shutdown leaves what the raylet has started
                    folder.clear()


class _Started:
    """The processes of an embedded Ray: children of this one that it did not have before, with
    their names."""

    def __init__(self, folder: leftovers.Folder | None) -> None:
        self._folder = folder
        self._me = psutil.Process()
        self._others = self._me.children()
        self.names: dict[psutil.Process, str] = {}

    def look(self) -> None:
        """Notes the children that there are now."""
        for child in self._me.children():
            with contextlib.suppress(psutil.Error):
                if child not in self._others:
                    self.names[child] = child.name()
        if self._folder is not None:
            self._folder.add(self.names)

    def live(self) -> bool:
        """Looks, and tells whether the servers that were seen still run."""
        self.look()
        return self.servers_live()

    def servers_live(self) -> bool:
        """Tells whether the servers that were seen still run."""
        return all(leftovers.lives(one) for one, name in self.names.items() if name in _SERVERS)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[dict[str, Any]]:
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
                # Within it: Ray opens its own folder to all.
                arguments["_temp_dir"] = f"{folder}/r"
            yield arguments
    finally:
        os.environ.pop(_LOOPBACK)
        if before is not None:
            os.environ[_LOOPBACK] = before


def _folder(stack: contextlib.ExitStack) -> leftovers.Folder:
    """Returns the folder of an embedded Ray."""
    try:
        return stack.enter_context(leftovers.folder(leftovers.RAY))
    except OSError as error:
        raise PlaceError(
            f"a local Ray cannot start: {error.filename}: {reason_of(error)}; free some space there"
        ) from error


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
    if not (port.isascii() and port.isdigit()):  # a word that Ray knows
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


def _check_loopback() -> None:
    """Raises PlaceError where the processes of an embedded Ray could not reach each other."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            socket.create_connection(listening.getsockname(), timeout=PROBE_S).close()
    except OSError as error:
        raise PlaceError(
            f"a local Ray cannot start: this machine does not reach itself at 127.0.0.1: "
            f"{reason_of(error)}"
        ) from None


def _authenticate() -> None:
    """Restricts the Ray that this process starts to itself and its workers, by a token."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    access.check_token()
    if os.environ["RAY_AUTH_MODE"] == "token" and not any(map(os.environ.get, TOKENS)):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if "ray" in sys.modules:  # it looked at the mode when it was imported
        ray_private.reload_config()
