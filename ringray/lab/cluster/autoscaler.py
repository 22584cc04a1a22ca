"""What Ray's autoscaler can start, and what it is about to.

Its configuration is no part of Ray's API. It is read where it lies: in the file that the
autoscaler's process on the head was started with, or in the RayCluster of KubeRay. Where neither
can be read, its verdict over one placement group is what is left: ``standing``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import ray
import ray.util.client
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ringray.lab.cluster import capacity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringray.lab.cluster.capacity import Capacity

ASK_S = 30.0  # for a task on the head to say what it knows; a new process there takes seconds
_RPC_S = 5  # for one answer of Ray's control plane


@dataclass(frozen=True)
class AutoscalerConfig:
    """What is known of an autoscaler. ``source``: ``config``; ``none``: there is none, nodes are
    added by hand; ``unknown``: there may be one."""

    source: Literal["config", "none", "unknown"]
    config: Mapping[str, Any] | None = None


def reach(present: Capacity) -> Capacity | None:
    """The nodes that the connected cluster can come to have; None where that cannot be known."""
    found = _ask()
    if found.source == "none":
        return present
    return capacity.of_config(found.config, present) if found.config is not None else None


def _ask() -> AutoscalerConfig:
    """Looks on this machine, and if the head is another one, there."""
    if ray.util.client.ray.is_connected():  # a client is told nothing of the control plane
        return AutoscalerConfig("unknown")
    port = _gcs_address().rpartition(":")[2]
    found = look(port)
    if found.source != "unknown":
        return found
    heads = [n["NodeID"] for n in ray.nodes() if n["Alive"] and capacity.HEAD in n["Resources"]]
    if not heads or heads[0] == ray.get_runtime_context().get_node_id():
        return found
    pinned = NodeAffinitySchedulingStrategy(heads[0], soft=False)
    task = ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned)
    try:
        answer: AutoscalerConfig = ray.get(task.remote(port), timeout=ASK_S)
    except (RayError, TimeoutError):  # the head may have another environment than the driver
        return found
    return answer


def look(port: str) -> AutoscalerConfig:
    """What this machine tells of the autoscaler of the Ray whose control plane is at ``port``."""
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        options = dict(
            word.split("=", 1) for word in command if word.startswith("--") and "=" in word
        )
        if not any(Path(word).name == "monitor.py" for word in command):  # no log_monitor.py
            continue
        if options.get("--gcs-address", "").rpartition(":")[2] != port:
            continue
        path = options.get("--autoscaling-config")
        return AutoscalerConfig("none") if path is None else _of_file(Path(path).expanduser())
    return _of_kubernetes()


def _of_file(path: Path) -> AutoscalerConfig:
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return AutoscalerConfig("unknown")
    return (
        AutoscalerConfig("config", config)
        if isinstance(config, dict)
        else AutoscalerConfig("unknown")
    )


def _of_kubernetes() -> AutoscalerConfig:
    """The RayCluster that this pod belongs to. KubeRay names it in the environment, and lets the
    head's service account read it when it runs the autoscaler beside the head."""
    name, space = os.environ.get("RAY_CLUSTER_NAME"), os.environ.get("RAY_CLUSTER_NAMESPACE")
    if not (name and space and "KUBERNETES_SERVICE_HOST" in os.environ):
        return AutoscalerConfig("unknown")
    try:
        from ray.autoscaler._private.kuberay import autoscaling_config, node_provider

        client = node_provider.KubernetesHttpApiClient(namespace=space)
        resource = client.get(f"rayclusters/{name}")
        if not resource["spec"].get("enableInTreeAutoscaling"):
            return AutoscalerConfig("none")
        return AutoscalerConfig(
            "config", autoscaling_config._derive_autoscaling_config_from_ray_cr(resource)
        )
    except Exception:  # no right to read it, or a Ray that keeps it elsewhere
        return AutoscalerConfig("unknown")


@dataclass(frozen=True)
class Standing:
    """How a waiting placement group stands with the autoscaler.

    ``starting``: nodes on their way, by type; ``failed``: types that could not be started -> why;
    ``refused``: the autoscaler finds no nodes for the group; ``busy``: others use the cluster;
    ``version``: of the cluster's state that it has seen, which grows with each of its rounds.
    """

    starting: Mapping[str, int]
    failed: Mapping[str, str]
    refused: bool
    busy: bool
    version: int

    def __str__(self) -> str:
        parts = [f"{count} × {name} starting" for name, count in self.starting.items()]
        parts += [f"{name} could not be started: {why}" for name, why in self.failed.items()]
        return "; ".join(parts)


def standing(group: str) -> Standing | None:
    """What the autoscaler says of placement group ``group`` (its id, in hex); None without one.

    Autoscaler v1 reports nothing here, and neither does v2 before its first round.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    try:
        answer = GcsClient(address=_gcs_address()).get_cluster_status(timeout_s=_RPC_S)
    except Exception:  # of many types; whoever waits for the group goes on without
        return None
    reply = autoscaler_pb2.GetClusterStatusReply.FromString(answer)
    return _standing(reply, group)


def _standing(reply: Any, group: str) -> Standing | None:
    state = reply.autoscaling_state
    if not state.last_seen_cluster_resource_state_version:
        return None
    starting: dict[str, int] = {}
    for request in state.pending_instance_requests:
        starting[request.ray_node_type_name] = (
            starting.get(request.ray_node_type_name, 0) + request.count
        )
    for instance in state.pending_instances:
        name = instance.ray_node_type_name
        starting[name] = starting.get(name, 0) + 1
    return Standing(
        starting=starting,
        failed={one.ray_node_type_name: one.reason for one in state.failed_instance_requests},
        refused=any(
            gang.details.partition(":")[0] == group
            for gang in state.infeasible_gang_resource_requests
        ),
        busy=any(
            node.available_resources.get(name, 0.0) < amount
            for node in reply.cluster_resource_state.node_states
            for name, amount in node.total_resources.items()
            if name in ("CPU", "GPU")
        ),
        version=state.last_seen_cluster_resource_state_version,
    )


def _gcs_address() -> str:
    return str(ray.get_runtime_context().gcs_address)
