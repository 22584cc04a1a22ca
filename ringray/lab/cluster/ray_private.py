"""Ray's private API: every use of it, so that a new version of Ray is checked against one file."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

ALIVE_S = 5.0  # seconds for the GCS to say that it lives


def check_alive(address: str, timeout_s: float) -> None:
    """Calls the GCS at ``address``, HOST:PORT; raises ``grpc.RpcError`` or AuthenticationError."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(init_grpc_channel(address))
    stub.CheckAlive(gcs_service_pb2.CheckAliveRequest(), timeout=timeout_s)


def cluster_lives() -> Callable[[], bool]:
    """Returns a function that tells whether the connected cluster's GCS answers; a client of a
    cluster, which cannot ask it, takes it to live."""
    import ray

    if ray.util.client.ray.is_connected():
        return lambda: True
    address = ray.get_runtime_context().gcs_address

    def answers() -> bool:
        with contextlib.suppress(Exception):  # of many types
            check_alive(address, ALIVE_S)
            return True
        return False

    return answers


def free_gpus() -> dict[str, float]:
    """Returns the GPUs that nobody uses by the node's id, as the cluster knew a moment ago; a
    client of a cluster, which cannot ask it, takes all to be free."""
    import ray

    if ray.util.client.ray.is_connected():
        return {node["NodeID"]: node["Resources"].get("GPU", 0.0) for node in ray.nodes()}
    from ray._private.state import available_resources_per_node

    return {node: free.get("GPU", 0.0) for node, free in available_resources_per_node().items()}


def cluster_status(address: str, timeout_s: float) -> Any | None:
    """Returns the GCS's ``GetClusterStatusReply`` with the state of nodes and autoscaler, or None
    if it does not answer."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    try:
        answer = GcsClient(address=address).get_cluster_status(timeout_s=timeout_s)
    except Exception:  # of many types while Ray starts or ends
        return None
    return autoscaler_pb2.GetClusterStatusReply.FromString(answer)


def kuberay_config(name: str, namespace: str) -> dict[str, Any]:
    """Returns the autoscaler's configuration in a RayCluster, empty if it has no autoscaler.

    Raises errors of many types, as without the right to read it.
    """
    from ray.autoscaler._private.kuberay import autoscaling_config, node_provider

    client = node_provider.KubernetesHttpApiClient(namespace=namespace)
    resource = client.get(f"rayclusters/{name}")
    if not resource["spec"].get("enableInTreeAutoscaling"):
        return {}
    config: dict[str, Any] = autoscaling_config._derive_autoscaling_config_from_ray_cr(resource)
    return config


def reload_config() -> None:
    """Makes Ray, if it was imported, read its environment variables and its token again."""
    if "ray" not in sys.modules:
        return
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def kill_without_grace() -> None:
    """Makes ``ray.shutdown`` kill the processes of this embedded Ray at once: Ray waits a second
    for each to react to SIGTERM."""
    from ray._private import worker

    node = worker._global_node
    if node is not None:
        end = node.kill_all_processes
        node.kill_all_processes = lambda **how: end(**how | {"allow_graceful": False})


@contextlib.contextmanager
def without_cluster() -> Iterator[None]:
    """Makes this process's Ray keep the loopback's address, as on systems without clusters; the
    variable RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, which Ray reads at import, does so for others."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def fixed_ports() -> Iterator[None]:
    """Makes a Ray that starts in the block give its agents ports that are free now: for an agent
    that chooses its own, the raylet waits 15 s and then ends."""
    from ray._private import parameter, ray_constants, services

    parameters, start = parameter.RayParams, services.start_ray_process
    with contextlib.ExitStack() as stack:
        ports: dict[str, int] = {}
        while len(ports) < len(_AGENT_PORTS):
            # Nobody else gets the port until the agent listens there: both may reuse it.
            held = stack.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            if (port := held.getsockname()[1]) not in _METRIC_PORTS:
                ports[_AGENT_PORTS[len(ports)]] = port

        def start_process(command: list[str], kind: str, *others: Any, **options: Any) -> Any:
            if kind == ray_constants.PROCESS_TYPE_RAYLET:  # Ray tells only the agent
                command = [*command, f"--{_LISTEN}={ports[_LISTEN]}"]
            return start(command, kind, *others, **options)

        parameter.RayParams = lambda **named: parameters(**named | ports)
        services.start_ray_process = start_process
        try:
            yield
        finally:
            parameter.RayParams, services.start_ray_process = parameters, start


_LISTEN = "dashboard_agent_listen_port"
_AGENT_PORTS = _LISTEN, "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port"
_METRIC_PORTS = 44217, 44227  # on which the monitor and dashboard of every Ray try to listen
DEAD = 2  # status of a node that has ended, in a reply of cluster_status
# Loggers that report each upload and each connection of Ray's job client.
JOB_LOGGERS = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
