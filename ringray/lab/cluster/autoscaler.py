"""Ray's autoscaler: the nodes that it can start, and those that it is starting.

Ray's API does not give the autoscaler's configuration. It is read from the file that the process on
the head was started with, or from the RayCluster of KubeRay.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.util.client
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ringray.lab.cluster import capacity, ray_private
from ringray.lab.cluster.capacity import Capacity

ASK_S = 30.0  # seconds for a task on the head to answer; a new process there takes some
_RPC_S = 5  # seconds for one answer of Ray's control plane


# An autoscaler's configuration; empty if there is no autoscaler and nodes are added by hand, None
# if there may be one.
Config = Mapping[str, Any] | None


def reach(present: Capacity) -> Capacity | None:
    """Returns the nodes that the connected cluster can grow to; None if that cannot be known."""
    config = _ask()
    if config is None:
        return None
    return capacity.from_config(config, present) if config else present


def _ask() -> Config:
    """Looks on this machine and, if the head is another one, there."""
    if ray.util.client.ray.is_connected():  # a client cannot ask the control plane
        return None
    port = _gcs_address().rpartition(":")[2]
    config = look(port)
    if config is not None:
        return config
    heads = [n["NodeID"] for n in ray.nodes() if n["Alive"] and capacity.HEAD in n["Resources"]]
    if not heads or heads[0] == ray.get_runtime_context().get_node_id():
        return None
    pinned = NodeAffinitySchedulingStrategy(heads[0], soft=False)
    task = ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned)
    try:
        answer: Config = ray.get(task.remote(port), timeout=ASK_S)
    except (RayError, TimeoutError):  # the head may have another environment than the driver
        return None
    return answer


def look(port: str) -> Config:
    """Looks on this machine for the autoscaler of the Ray whose control plane is at ``port``."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []  # None if this user may not read it
        assigned = (word for word in command if word.startswith("--") and "=" in word)
        options = dict(word.split("=", 1) for word in assigned)
        if not any(Path(word).name == "monitor.py" for word in command):  # no log_monitor.py
            continue
        if options.get("--gcs-address", "").rpartition(":")[2] != port:
            continue
        path = options.get("--autoscaling-config")
        return {} if path is None else _from_file(Path(path).expanduser())
    return _from_kubernetes()


def _from_file(path: Path) -> Config:
    import yaml

    with suppress(OSError, ValueError, yaml.YAMLError):
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(config, dict):
            return config
    return None


def _from_kubernetes() -> Config:
    """Reads the RayCluster of this pod. KubeRay names it in the environment, and lets the head's
    service account read it if the autoscaler runs beside the head."""
    name, space = os.environ.get("RAY_CLUSTER_NAME"), os.environ.get("RAY_CLUSTER_NAMESPACE")
    if not (name and space and "KUBERNETES_SERVICE_HOST" in os.environ):
        return None
    try:
        return ray_private.kuberay_config(name, space)
    except Exception:  # no right to read it, or a Ray that keeps it elsewhere
        return None


@dataclass(frozen=True)
class StartingNodes:
    """Nodes that the autoscaler starts."""

    starting: Mapping[str, int]  # their number, by type
    failed: Mapping[str, str]  # the reason, by type that could not be started
    booting: bool = False  # some of those that start are there and boot

    def __str__(self) -> str:
        parts = [f"{count} × {name} starting" for name, count in self.starting.items()]
        parts += [f"{name} could not be started: {why}" for name, why in self.failed.items()]
        return "; ".join(parts)


def starting() -> StartingNodes | None:
    """Returns the nodes that the autoscaler starts; None without one.

    Autoscaler v1 reports nothing here, and neither does v2 before its first round.
    """
    reply = ray_private.cluster_status(_gcs_address(), _RPC_S)
    state = reply.autoscaling_state if reply is not None else None
    if state is None or not state.last_seen_cluster_resource_state_version:
        return None
    count = Counter(instance.ray_node_type_name for instance in state.pending_instances)
    for request in state.pending_instance_requests:
        count[request.ray_node_type_name] += request.count
    failed = {
        request.ray_node_type_name: request.reason.strip() or "Ray gives no reason"
        for request in state.failed_instance_requests
    }
    return StartingNodes(count, failed, bool(state.pending_instances))


def _gcs_address() -> str:
    return str(ray.get_runtime_context().gcs_address)
