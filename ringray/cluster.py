"""The Ray that a sweep runs on: an embedded local one, or a cluster that is already there."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from ringray import joining
from ringray.errors import PlaceError
from ringray.pruning import Reason, unfit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringray.plan import Config
    from ringray.ring import Placement

LOCAL_RANKS = 8  # ranks that share the cores of a machine without GPUs, if it has fewer cores
RANK_BYTES = 512 << 20  # resident memory of a rank that does nothing yet
GRACE_S = 5.0  # for the processes of an embedded Ray to end by themselves
PROBE_S = 5.0  # for a cluster's address to answer
_WAY_OUT = "; shrink ring.size, or name a larger cluster: --address"
_STRATEGIES = {
    "pack": "PACK",
    "spread": "SPREAD",
    "strict-pack": "STRICT_PACK",
    "strict-spread": "STRICT_SPREAD",
}


@dataclass(frozen=True)
class Cluster:
    """A connected Ray. ``local``: started by this process, for this process alone."""

    local: bool
    cpus: float
    gpus: float
    nodes: int

    def device(self, wanted: str) -> str:
        """cpu or cuda; ``auto`` takes GPUs where there are any."""
        if wanted != "auto":
            return wanted
        return "cuda" if self.gpus >= 1 else "cpu"

    def placement(self, config: Config) -> Placement:
        """What each rank of the trial's ring asks Ray for."""
        from ringray.ring import Placement

        device = self.device(config.device)
        # On the embedded Ray ranks may share cores: what CPU rings are for is to be tried out.
        cpus = 1.0 if self.local or device == "cuda" else float(config.threads)
        bundle = (("CPU", cpus), ("GPU", 1.0)) if device == "cuda" else (("CPU", cpus),)
        return Placement(device, config.threads, _STRATEGIES[config.placement], bundle)

    def refusal(self, config: Config) -> Reason | None:
        """Why the trial can never run here, or None."""
        need = dict(self.placement(config).bundle)
        for name, have in (("GPU", self.gpus), ("CPU", self.cpus)):
            total = need.get(name, 0.0) * config.ring_size
            if total > have:
                return Reason(
                    "ring.size",
                    f"a ring of {config.ring_size} needs {total:g} {name}s, "
                    f"{'this machine' if self.local else 'the cluster'} can hold {have:g}"
                    + _WAY_OUT,
                )
        if config.placement == "strict-spread" and config.ring_size > self.nodes:
            return Reason(
                "ring.size",
                f"strict-spread of {config.ring_size} ranks needs as many nodes, "
                f"there are {self.nodes}" + _WAY_OUT,
            )
        return unfit(config, self.device(config.device))


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
    if local:
        _authenticate()
    else:
        joining.use_given_token()
        _check_answers(str(address))
    import ray

    arguments: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if local:
        arguments |= {
            "address": "local",
            "num_cpus": local_ranks(),
            "include_dashboard": False,
        }
    else:
        arguments["address"] = address
    me = psutil.Process()
    others, started = me.children(), list[psutil.Process]()
    try:
        try:
            ray.init(**arguments)
        except Exception as error:  # of many types, ConnectionError and RuntimeError among them
            why = joining.reason(error)
            raise PlaceError(f"cannot reach {name(address)}: {why}") from error
        finally:
            # Of this embedded Ray alone: later children, the tracker among them, are not its own.
            if local:
                started = [child for child in me.children() if child not in others]
        resources = ray.cluster_resources()
        alive = [node for node in ray.nodes() if node["Alive"]]
        yield Cluster(local, resources.get("CPU", 0.0), resources.get("GPU", 0.0), len(alive))
    finally:
        family = _with_descendants(started)
        ray.shutdown()
        # Ray kills its raylet after one second of grace, and then nobody ends what that started.
        for process in psutil.wait_procs(family, timeout=GRACE_S)[1]:
            with contextlib.suppress(psutil.Error):
                process.kill()


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
        joining.check(address)


def _authenticate() -> None:
    """Only this process and its workers may talk to the Ray that it starts."""
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
    if os.environ["RAY_AUTH_MODE"] == "token" and not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _has_token() -> bool:
    return any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
