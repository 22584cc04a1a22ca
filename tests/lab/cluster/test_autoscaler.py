"""Ray's autoscaler: its configuration, its status, and how long a ring waits for its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated import autoscaler_pb2 as messages

from ringray.base.errors import PlaceError
from ringray.lab.cluster import autoscaler, placement_wait
from ringray.lab.cluster.autoscaler import StartingNodes
from ringray.lab.cluster.placement_wait import MovedError, WaitLimits
from tests.support.cluster_files import cluster_spec

# Places of the configuration


def test_the_configuration_is_read_where_the_autoscaler_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "autoscaling.yaml"
    path.write_text("max_workers: 3\n")
    commands = [
        ["python", "log_monitor.py", "--gcs-address=10.0.0.1:64001"],
        ["python", "monitor.py", "--gcs-address=10.0.0.1:64001", f"--autoscaling-config={path}"],
        ["python", "monitor.py", "--gcs-address=10.0.0.1:64002"],
        None,  # of another user
    ]
    processes = [SimpleNamespace(info={"cmdline": command}) for command in commands]
    monkeypatch.setattr(autoscaler.psutil, "process_iter", lambda _: processes)
    assert autoscaler.look("64001") == {"max_workers": 3}
    assert autoscaler.look("64002") == {}
    assert autoscaler.look("64003") is None
    path.write_text("max_workers: [\n")
    assert autoscaler.look("64001") is None
    path.unlink()
    assert autoscaler.look("64001") is None


def test_a_pod_asks_kubernetes_for_its_raycluster(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.autoscaler._private.kuberay import node_provider

    answers: dict[str, Any] = {}

    class Client:
        def __init__(self, namespace: str) -> None:
            assert namespace == "team"

        def get(self, path: str) -> Any:
            return answers[path]

    monkeypatch.setattr(node_provider, "KubernetesHttpApiClient", Client)
    for name, value in (
        ("RAY_CLUSTER_NAME", "ringray"), ("RAY_CLUSTER_NAMESPACE", "team"),
        ("KUBERNETES_SERVICE_HOST", "10.0.0.1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    assert autoscaler.look("64009") is None  # it may not be read
    spec = {**cluster_spec(), "enableInTreeAutoscaling": False}
    manifest = {"metadata": {"name": "ringray", "namespace": "team"}, "spec": spec}
    answers["rayclusters/ringray"] = manifest
    assert autoscaler.look("64009") == {}
    spec["enableInTreeAutoscaling"] = True
    config = autoscaler.look("64009")
    types = list(config["available_node_types"].values())
    assert [kind["resources"].get("GPU", 0) for kind in types] == [0, 1, 8, 8, 8]


# Nodes that start


def reply(version: int = 1, **state: Any) -> Any:
    return messages.GetClusterStatusReply(
        autoscaling_state=messages.AutoscalingState(
            last_seen_cluster_resource_state_version=version, **state
        )
    )


def test_nodes_on_their_way_are_counted_by_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(answer: Any) -> StartingNodes | None:
        monkeypatch.setattr(autoscaler, "_gcs_address", lambda: "h:1")
        monkeypatch.setattr(autoscaler.ray_private, "cluster_status", lambda *_: answer)
        return autoscaler.starting()

    assert says(None) is None
    assert says(reply(version=0)) is None  # it has not looked yet
    answer = says(
        reply(
            pending_instance_requests=[
                messages.PendingInstanceRequest(ray_node_type_name="gpu", count=2)
            ],
            pending_instances=[
                messages.PendingInstance(ray_node_type_name="gpu"),
                messages.PendingInstance(ray_node_type_name="cpu"),
            ],
            failed_instance_requests=[
                messages.FailedInstanceRequest(ray_node_type_name="big", reason="no capacity"),
                messages.FailedInstanceRequest(ray_node_type_name="odd", reason=" "),
            ],
        )
    )
    assert answer.booting
    assert str(answer) == (
        "3 × gpu starting; 1 × cpu starting; big could not be started: no capacity; "
        "odd could not be started: Ray gives no reason"
    )


# Waiting


class Group:
    """A placement group that is ready at the ``ready``-th look."""

    def __init__(self, ready: int) -> None:
        self.looks, self.ready = 0, ready

    def wait(self, timeout: float) -> bool:
        self.looks += 1
        return self.looks > self.ready


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[StartingNodes | None]], None]:
    """A second passes with each look at the autoscaler, which says what it was given."""
    now = [0.0]

    def says(starting: list[StartingNodes | None]) -> None:
        waiting = iter(starting)

        def look() -> StartingNodes | None:
            now[0] += 1.0
            return next(waiting)

        monkeypatch.setattr(autoscaler, "starting", look)

    monkeypatch.setattr(placement_wait.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(placement_wait.ray, "available_resources", lambda: {"CPU": 1.0})
    return says


def starts(count: int, booting: bool = False) -> StartingNodes:
    return StartingNodes({"gpu": count}, {}, booting)


def waits(group: Group, seconds: float = 600, **options: Any) -> list[str]:
    """Waits for the place of a ring of 2; returns what was told meanwhile."""
    texts: list[str] = []
    placement_wait.wait(group, 2, {"CPU": 1.0}, WaitLimits(seconds, texts.append, **options))
    return texts


def test_the_reason_of_a_wait_is_told_once(clock: Any) -> None:
    clock([StartingNodes({}, {}), *[starts(4)] * 5, *[starts(1)] * 5, None])
    assert waits(Group(12)) == [
        "waiting for nodes: 4 × gpu starting",
        "waiting for nodes: 1 × gpu starting",
        "waiting for a place for 2 ranks, free now 1 CPU",
    ]
    assert waits(Group(0)) == []  # it has a place at once


@pytest.mark.parametrize("boots", [0, 40])
def test_a_wait_ends_and_nodes_that_boot_do_not_count(clock: Any, boots: int) -> None:
    """Nodes that the autoscaler only asks for do, and so does what comes when they have failed."""
    clock([starts(2), *[starts(2, booting=True)] * boots, starts(2), None, None, None, None])
    group = Group(99)
    with pytest.raises(PlaceError, match=r"after 5 s \(limits.place_timeout\): each rank needs 1"):
        waits(group, seconds=5)
    assert group.looks == 5 + boots


def test_a_place_that_others_changed_is_asked_for_anew(clock: Any) -> None:
    clock([None] * 10)
    with pytest.raises(MovedError):
        waits(Group(99), moved=iter([False, True]).__next__)
