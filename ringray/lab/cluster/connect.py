"""The Ray that a sweep runs on: an embedded local one, or a cluster that is already there."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

import psutil

from ringray.base.errors import PlaceError
from ringray.lab.cluster import access
from ringray.lab.cluster.capacity import Placement, of_nodes
from ringray.lab.plan.pruning import Reason, unfit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ringray.lab.cluster.capacity import Capacity
    from ringray.lab.trial.config import TrialConfig

LOCAL_RANKS = 8  # ranks that share the cores of a machine without GPUs, if it has fewer cores
RANK_BYTES = 512 << 20  # resident memory of a rank that does nothing yet
GRACE_S = 5.0  # for the processes of an embedded Ray to be gone after they were killed
PROBE_S = 5.0  # for a cluster's address to answer
# Ray turns the loopback's address into one that others can reach, unless it thinks that it can have
# no cluster.
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_STRATEGIES = {
    "pack": "PACK",
    "spread": "SPREAD",
    "strict-pack": "STRICT_PACK",
    "strict-spread": "STRICT_SPREAD",
}


class Cluster:
    """A connected Ray.

    ``local``: started by this process, for this process alone; ``present``: the nodes that it has;
    ``reach``: asks which it can come to have, None where that cannot be known. It is asked once,
    and only when those that are there do not answer the question.
    """

    def __init__(
        self, local: bool, present: Capacity, reach: Callable[[], Capacity | None] | None = None
    ) -> None:
        self.local = local
        self.present = present
        self._ask = reach or (lambda: present)

    @cached_property
    def reach(self) -> Capacity | None:
        """The nodes that there can be; None where that cannot be known."""
        return self._ask()

    def device(self, wanted: str) -> str:
        """cpu or cuda; ``auto`` takes GPUs where there are any, or can be."""
        if wanted != "auto":
            return wanted
        if self.present.has("GPU"):
            return "cuda"
        return "cuda" if self.reach is not None and self.reach.has("GPU") else "cpu"

    def placement(self, config: TrialConfig) -> Placement:
        """What each rank of the trial's ring asks Ray for."""
        device = self.device(config.device)
        # On the embedded Ray ranks may share cores: what CPU rings are for is to be tried out.
        cpus = 1.0 if self.local or device == "cuda" else float(config.threads)
        bundle = (("CPU", cpus), ("GPU", 1.0)) if device == "cuda" else (("CPU", cpus),)
        return Placement(device, _STRATEGIES[config.placement], bundle)

    def certain(self, config: TrialConfig) -> bool:
        """Whether it is known that the trial's ring finds a place, if only it waits."""
        return self._here(config) or self.reach is not None

    def exact(self, config: TrialConfig) -> bool:
        """Whether a ring has the trial's ranks and no more: idle GPUs cost, and so do nodes that a
        cluster would give back."""
        return self.device(config.device) == "cuda" or self.reach != self.present

    def spare(self, config: TrialConfig, without: Iterable[str]) -> bool:
        """Whether the trial's ring fits on the nodes that there are now, less some (Ray's ids)."""
        import ray

        left = set(without)
        there = of_nodes(node for node in ray.nodes() if node["NodeID"] not in left)
        return self._largest(there, config) >= config.ring_size

    def refusal(self, config: TrialConfig) -> Reason | None:
        """Why the trial can never run here, or None."""
        if not self._here(config):
            offer = self.reach
            if offer is not None and self._largest(offer, config) < config.ring_size:
                return self._too_much(offer, config)
        return unfit(config, self.device(config.device))

    def _here(self, config: TrialConfig) -> bool:
        return self._largest(self.present, config) >= config.ring_size

    def _largest(self, offer: Capacity, config: TrialConfig) -> float:
        placement = self.placement(config)
        return offer.ranks(dict(placement.bundle), placement.strategy)

    def _too_much(self, offer: Capacity, config: TrialConfig) -> Reason:
        placement, size = self.placement(config), config.ring_size
        where = "this machine can hold" if self.local else "the cluster can offer"
        if placement.device == "cuda" and not offer.has("GPU"):
            return Reason(
                "ring.device",
                f"cuda needs GPUs, {where} none: {offer}; take device: cpu, or name another "
                "cluster: --address",
            )
        need = " and ".join(f"{amount * size:g} {name}s" for name, amount in placement.bundle)
        how = {"STRICT_PACK": " on one node", "STRICT_SPREAD": " on as many nodes"}
        largest = self._largest(offer, config)
        return Reason(
            "ring.size",
            f"a ring of {size} needs {need}{how.get(placement.strategy, '')}, {where} "
            f"{f'rings of up to {largest:g}' if largest else 'no such rank'}: {offer}; "
            "shrink ring.size, or name a larger cluster: --address",
        )


def local_ranks() -> int:
    """Ranks that the embedded Ray takes on: one per core, and at least a few for trying things out,
    as far as memory goes."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    by_memory = psutil.virtual_memory().available // RANK_BYTES
    return int(max(1, min(max(cores, LOCAL_RANKS), by_memory)))


def name(address: str | None) -> str:
    """What ``connect(address)`` connects to, in words."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    return "a local Ray" if address == "local" else f"Ray at {address}"


@contextlib.contextmanager
def connect(address: str | None) -> Iterator[Cluster]:
    """Ray at ``address`` (default: RAY_ADDRESS), or an embedded local Ray that ends with the block.

    Raises:
        PlaceError: no Ray answers at the address, or a local one cannot start.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    local = address in (None, "local")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray prints a dead worker's obituary to stdout even with log_to_driver=False, in between what
    # we write there (--json - too); the ring reports the fault itself.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    # And tracebacks of ranks whose answer nobody waits for any more, after another one failed.
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

    me = psutil.Process()
    others, started = me.children(), list[psutil.Process]()
    try:
        try:
            with _deaf() if local else contextlib.nullcontext():
                ray.init(**arguments)
        except Exception as error:  # of many types, ConnectionError and RuntimeError among them
            why = access.reason(error)
            raise PlaceError(f"cannot reach {name(address)}: {why}") from error
        finally:
            # Of this embedded Ray alone: later children, the tracker among them, are not its own.
            if local:
                started = [child for child in me.children() if child not in others]
        present = of_nodes(ray.nodes())
        yield Cluster(local, present, None if local else lambda: _reach(present))
    finally:
        family = _with_descendants(started)
        if local:
            _forbid_grace()
        ray.shutdown()
        # Nobody else ends what the raylet has started.
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        until = time.monotonic() + GRACE_S
        while any(map(_lives, family)) and time.monotonic() < until:
            time.sleep(0.01)


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started in the block do not hear SIGTERM. Who stops a job sends it to all
    of its processes at once; a driver whose Ray is gone cannot end in order."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forbid_grace() -> None:
    """Ray would wait a second for each of its processes to hear SIGTERM."""
    from ray._private import worker

    node = worker._global_node
    if node is not None:
        end = node.kill_all_processes
        node.kill_all_processes = lambda **how: end(**how | {"allow_graceful": False})


@contextlib.contextmanager
def _alone() -> Iterator[dict[str, Any]]:
    """What an embedded Ray is started with, so that nobody but this user comes near it: it listens
    on the loopback alone, where Ray by itself takes all interfaces; and its sockets and logs lie in
    a folder of their own, where Ray's default under /tmp is open to every user of the machine. That
    of ``RAY_TMPDIR`` is left as it is: somebody has chosen it."""
    from ray._private import ray_constants

    before = os.environ.get(_LOOPBACK), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[_LOOPBACK] = "0"  # for the processes that Ray starts
    ray_constants.ENABLE_RAY_CLUSTER = False  # for this one, which has read the variable
    arguments: dict[str, Any] = {
        "address": "local",
        "num_cpus": local_ranks(),
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    try:
        with contextlib.ExitStack() as stack:
            if "RAY_TMPDIR" not in os.environ:
                folder = tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True)
                # Within it: Ray opens its own folder to all. Short: sockets lie in it.
                arguments["_temp_dir"] = f"{stack.enter_context(folder)}/r"
            yield arguments
    finally:
        os.environ.pop(_LOOPBACK)
        if before[0] is not None:
            os.environ[_LOOPBACK] = before[0]
        ray_constants.ENABLE_RAY_CLUSTER = before[1]


def _reach(present: Capacity) -> Capacity | None:
    from ringray.lab.cluster import autoscaler

    return autoscaler.reach(present)


def _lives(process: psutil.Process) -> bool:
    """Whether it does anything: the dead may wait for whoever has inherited them to take note."""
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
    """PlaceError unless a Ray that lets us in listens at HOST:PORT: Ray itself would try for
    minutes."""
    if address.startswith(("http://", "https://")):
        raise PlaceError(
            f"{address} is a dashboard, which `ringray submit` takes; --address here is HOST:PORT "
            "of the cluster's GCS, by default port 6379"
        )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # auto, or another word that Ray knows
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
    """Only this process and its workers may talk to the Ray that it starts."""
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
    if os.environ["RAY_AUTH_MODE"] == "token" and not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if "ray" in sys.modules:  # it looked at the mode when it was imported
        from ray._raylet import Config  # type: ignore[attr-defined]

        Config.initialize("")


def _has_token() -> bool:
    return any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
