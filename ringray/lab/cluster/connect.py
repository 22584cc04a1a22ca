"""The connection to Ray: an embedded local one, or a cluster that runs already."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ringray.base import deadline, signals
from ringray.base.deadline import within
from ringray.base.errors import ClusterError, PlaceError, reason_of
from ringray.lab.cluster import access, embedded, ray_private
from ringray.lab.cluster.capacity import from_nodes
from ringray.lab.cluster.fit import Cluster

START_S = 120.0  # seconds for a connection
CALL_S = 10.0  # seconds for one call of a connected Ray
PROBE_S = 5.0  # seconds for a cluster's address to answer
LOOK_S = 2.0  # seconds between two looks whether it lives
LOST_S = 20.0  # seconds without a sign of life of a cluster; Ray itself waits for 60
END_S = 30.0  # seconds for the main thread to end in order


def target(address: str | None) -> str:
    """Returns the address to which ``connect(address)`` connects; "local" is an embedded Ray."""
    return address or os.environ.get("RAY_ADDRESS") or "local"


def name(address: str | None) -> str:
    """Returns what ``connect(address)`` connects to, for messages."""
    address = target(address)
    return embedded.NAME if address == "local" else f"Ray at {address}"


@contextlib.contextmanager
def connect(address: str | None) -> Iterator[Cluster]:
    """Connects to Ray at ``address`` (default: RAY_ADDRESS), or starts an embedded local Ray that
    ends with the block, as do the variables that it needs in the environment.

    Raises:
        PlaceError: no Ray answers at the address, or a local one cannot start; a ClusterError if
            the same may succeed later, or Ray has ended in the block.
    """
    address = target(address)
    local = address == "local"
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(_variables())
        if local:
            servers = stack.enter_context(embedded.started())
            watch = _watched(embedded.NAME, lambda: not servers.lost(), 0.0, servers.reason)
        else:
            access.use_given_token()
            ray_private.reload_config()
            _check_answers(address)
            stack.enter_context(_joined(address))
            watch = _watched(name(address), ray_private.cluster_lives(), LOST_S)
        stack.enter_context(watch)
        with signals.blocked():  # also for the threads of what it imports
            import ray

            from ringray.lab.cluster import autoscaler
        present = from_nodes(_asked(address, CALL_S, ray.nodes))
        yield Cluster(local, present, None if local else lambda: autoscaler.reach(present))
    finally:
        with signals.blocked():
            stack.close()


@contextlib.contextmanager
def _variables() -> Iterator[None]:
    """Sets variables of every Ray in the environment, which is as before after the block."""
    before = dict(os.environ)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray reports a dead worker on stdout even with log_to_driver=False, between our own lines
    # (--json - too); the ring reports the fault itself.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    # Ray also prints tracebacks of ranks that fail after another one failed.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    try:
        yield
    finally:
        for variable in os.environ.keys() - before:  # Ray and others set some, too
            del os.environ[variable]
        os.environ.update(before)
        ray_private.reload_config()


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    """Connects to the Ray of a cluster, until the end of the block."""
    with signals.blocked():
        import ray

    ended = threading.Event()
    init = functools.partial(
        ray.init, address=address, log_to_driver=False, logging_level=logging.ERROR
    )
    try:
        with signals.blocked():
            _asked(address, START_S, init, until=ended)
        yield
    finally:
        with contextlib.suppress(TimeoutError):
            within(CALL_S, f"the end of {name(address)}", ray.shutdown)
        ended.set()


def _asked(address: str, seconds: float, call: Callable[[], Any], **options: Any) -> Any:
    """Returns the answer of the Ray at ``address``; raises PlaceError if it has none."""
    try:
        return within(seconds, name(address), call, **options)
    except Exception as error:  # of many types, ConnectionError and RuntimeError among them
        raise PlaceError(f"cannot reach {name(address)}: {reason_of(error)}") from error


def _check_answers(address: str) -> None:
    """Raises PlaceError unless a Ray that accepts this process listens at HOST:PORT: Ray itself
    would try for minutes."""
    if address.startswith(("http://", "https://")):
        raise PlaceError(
            f"{address} is a dashboard, which `ringray submit` takes; --address here is HOST:PORT "
            "of the cluster's GCS, by default port 6379"
        )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (port.isascii() and port.isdigit()):  # a word that Ray knows, such as auto
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except (OSError, OverflowError) as error:
        raise PlaceError(
            f"no Ray answers at {address}: {reason_of(error)}; start one (`ray start --head`), "
            "or give no address to run on this machine alone"
        ) from None
    if not address.startswith("ray://"):
        access.check(address)


@contextlib.contextmanager
def _watched(
    watched: str, lives: Callable[[], bool], patience: float, reason: Callable[[], str] = str
) -> Iterator[None]:
    """Ends a block whose Ray has ended, which a thread looks for.

    Ray's own calls wait for a control plane that is gone, and after a minute Ray ends the process,
    as a crash does. So the main thread is interrupted before that, as by Ctrl-C, and ends in order;
    a second later than it may take, the process ends.

    Args:
        watched: the Ray, for messages.
        lives: tells whether it does.
        patience: seconds without a sign of life.
        reason: says why it has ended, if it can.

    Raises:
        ClusterError: Ray was lost.
    """
    lost: list[ClusterError] = []
    ended = threading.Event()
    # Python handles signals in its main thread only.
    in_main = threading.current_thread() is threading.main_thread()

    def look() -> None:
        seen = time.monotonic()
        while not ended.wait(LOOK_S):
            if lives():
                seen = time.monotonic()
            elif time.monotonic() - seen >= patience:
                break
        if ended.is_set() or not in_main:
            return
        why = reason()
        error = ClusterError(
            f"{watched} has ended or no longer answers{why and f': {why}'}; what was measured "
            "is kept, and `ringray resume SWEEP` continues"
        )
        lost.append(error)
        if signal.getsignal(signal.SIGINT) is not signals.quit_at_once:  # it ends already
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not ended.wait(END_S):
            deadline.say(f"error: {error}")
            os._exit(error.exit_code)

    threading.Thread(target=look, name="watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        if lost:
            raise lost[0]
