"""Ray's autoscaler: its configuration, its status, and how long a ring waits for its place."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from ray.core.generated import autoscaler_pb2 as messages

from ringray.base.errors import PlaceError
from ringray.lab.cluster import autoscaler, placement_wait
from ringray.lab.cluster.autoscaler import AutoscalerVerdict
from ringray.lab.cluster.placement_wait import MovedError, WaitLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

GROUP = "ab" * 18


# Places of the configuration


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Starts processes whose command line is that of Ray's autoscaler."""
    started = []

    def start(*options: str, name: str = "monitor.py") -> None:
        program = tmp_path / name
        program.write_text("import time\nprint('up', flush=True)\ntime.sleep(3600)\n")
        process = subprocess.Popen(
            [sys.executable, str(program), *options], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_configuration_is_read_where_the_autoscaler_reads_it(
    monitor: Callable[..., None], tmp_path: Path
) -> None:
    path = tmp_path / "autoscaling.yaml"
    path.write_text("max_workers: 3\n")
    monitor("--gcs-address=10.0.0.1:64001", f"--autoscaling-config={path}")
    monitor("--gcs-address=10.0.0.1:64002")
    assert autoscaler.look("64001") == {"max_workers": 3}
    assert autoscaler.look("64002") == {}
    assert autoscaler.look("64003") is None
    path.write_text("max_workers: [\n")
    assert autoscaler.look("64001") is None
    path.unlink()
    assert autoscaler.look("64001") is None


def test_nodes_watching_their_logs_are_no_autoscaler(
    monitor: Callable[..., None], tmp_path: Path
) -> None:
    path = tmp_path / "autoscaling.yaml"
    path.write_text("max_workers: 3\n")
    monitor("--gcs-address=10.0.0.1:64001", name="log_monitor.py")
    assert autoscaler.look("64001") is None
    monitor("--gcs-address=10.0.0.1:64001", f"--autoscaling-config={path}")
    assert autoscaler.look("64001") == {"max_workers": 3}


def raycluster(autoscaling: bool) -> dict[str, Any]:
    def group(cpu: str, gpu: str | None) -> dict[str, Any]:
        limits = {"cpu": cpu, "memory": "8Gi"} | ({"nvidia.com/gpu": gpu} if gpu else {})
        return {
            "rayStartParams": {} if gpu else {"num-cpus": "0"},
            "template": {"spec": {"containers": [{"resources": {"limits": limits}}]}},
        }

    worker = {"groupName": "gpu", "minReplicas": 0, "maxReplicas": 3, **group("8", "2")}
    return {
        "metadata": {"name": "ringray", "namespace": "team"},
        "spec": {
            "enableInTreeAutoscaling": autoscaling,
            "headGroupSpec": group("2", None),
            "workerGroupSpecs": [worker],
        },
    }


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
    answers["rayclusters/ringray"] = raycluster(False)
    assert autoscaler.look("64009") == {}
    answers["rayclusters/ringray"] = raycluster(True)
    found = autoscaler.look("64009")
    assert found is not None
    gpu = found["available_node_types"]["gpu"]
    assert (gpu["max_workers"], gpu["resources"]["GPU"], found["max_workers"]) == (3, 2, 3)


# Status of a placement group


def reply(version: int = 1, **state: Any) -> Any:
    return messages.GetClusterStatusReply(
        autoscaling_state=messages.AutoscalingState(
            last_seen_cluster_resource_state_version=version, **state
        )
    )


def test_an_autoscaler_that_has_not_spoken_says_nothing() -> None:
    assert autoscaler._verdict(reply(version=0), GROUP) is None


def test_nodes_on_their_way_are_counted_by_type() -> None:
    answer = autoscaler._verdict(
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
        ),
        GROUP,
    )
    assert answer is not None
    assert answer.booting
    assert str(answer) == (
        "3 × gpu starting; 1 × cpu starting; big could not be started: no capacity; "
        "odd could not be started: Ray gives no reason"
    )


@pytest.mark.parametrize(("group", "refused"), [(GROUP, True), ("cd" * 18, False)])
def test_a_refusal_names_its_group(group: str, refused: bool) -> None:
    gang = messages.GangResourceRequest(details=f"{GROUP}:PACK|PENDING")
    answer = autoscaler._verdict(reply(infeasible_gang_resource_requests=[gang]), group)
    assert answer is not None
    assert answer.refused is refused


# Waiting


class Group:
    """A placement group that is ready at the ``ready``-th look."""

    def __init__(self, ready: int) -> None:
        self.looks, self.ready = 0, ready
        self.id = self

    def hex(self) -> str:
        return GROUP

    def wait(self, timeout: float) -> bool:
        self.looks += 1
        return self.looks > self.ready


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[AutoscalerVerdict | None]], None]:
    """A second passes with each look at the autoscaler, which says what it was given."""
    now = [0.0]

    def says(told: list[AutoscalerVerdict | None]) -> None:
        waiting = iter(told)

        def verdict(group: str) -> AutoscalerVerdict | None:
            assert group == GROUP
            now[0] += 1.0
            return next(waiting)

        monkeypatch.setattr(autoscaler, "verdict", verdict)

    monkeypatch.setattr(placement_wait.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(placement_wait.ray, "available_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(placement_wait.ray, "cluster_resources", lambda: {"CPU": 2.0})
    return says


def verdict(
    version: int, refused: bool = False, busy: bool = False, starting: int = 0
) -> AutoscalerVerdict:
    return AutoscalerVerdict({"gpu": starting} if starting else {}, {}, refused, busy, version)


def test_who_waits_is_told_why_once_for_each_reason(clock: Any) -> None:
    clock([verdict(1), *[verdict(2, starting=4)] * 5, *[verdict(3, starting=1)] * 5, None])
    told: list[str] = []
    placement_wait.wait(Group(12), 4, {"CPU": 1.0}, WaitLimits(60, told.append))
    assert told == [
        "waiting for nodes: 4 × gpu starting",
        "waiting for nodes: 1 × gpu starting",
        "waiting for a place for 4 ranks, free now 1 CPU",
    ]


def test_a_place_at_once_is_no_news(clock: Any) -> None:
    clock([])
    told: list[str] = []
    placement_wait.wait(Group(0), 2, {"CPU": 1.0}, WaitLimits(60, told.append))
    assert told == []


def test_patience_ends(clock: Any) -> None:
    clock([verdict(1, starting=2)] * 10)
    with pytest.raises(
        PlaceError, match=r"after 5 s \(limits.place_timeout\): each rank needs 1 CPU"
    ):
        placement_wait.wait(Group(99), 2, {"CPU": 1.0}, WaitLimits(5, lambda text: None))


@pytest.mark.parametrize("boots", [0, 3, 40])
def test_nodes_that_boot_cost_no_patience(clock: Any, boots: int) -> None:
    """Nodes that the autoscaler only asks for do, and so does what comes when they have failed."""
    booting = AutoscalerVerdict({"gpu": 2}, {}, False, False, 1, booting=True)
    asked = verdict(1, starting=2)
    clock([asked, *[booting] * boots, asked, None, None, None, None])
    group, wait_limits = Group(99), WaitLimits(5, lambda text: None)
    with pytest.raises(PlaceError, match="after 5 s"):
        placement_wait.wait(group, 2, {"CPU": 1.0}, wait_limits)
    assert group.looks == 5 + boots
    assert sum(wait_limits.booting) == boots


def test_a_place_that_others_changed_is_asked_for_anew(clock: Any) -> None:
    clock([verdict(1)] * 10)
    wait_limits = WaitLimits(60, lambda text: None, moved=iter([False, True]).__next__)
    with pytest.raises(MovedError):
        placement_wait.wait(Group(99), 2, {"CPU": 1.0}, wait_limits)


def test_a_refusal_that_lasts_is_believed_where_nothing_else_is_known(clock: Any) -> None:
    refusals = [verdict(version, refused=True) for version in range(1, 30)]
    clock(list(refusals))
    group = Group(99)
    with pytest.raises(PlaceError, match="the autoscaler has no nodes to start for that"):
        placement_wait.wait(
            group, 8, {"CPU": 1.0}, WaitLimits(600, lambda text: None, will_fit=False)
        )
    assert group.looks <= placement_wait.NEVER_S + 2


@pytest.mark.parametrize(
    "said",
    [
        [verdict(1, refused=True)] * 20,  # said once: the autoscaler has not looked again
        [verdict(n, refused=True, busy=True) for n in range(20)],
        [verdict(n, refused=True, starting=1) for n in range(20)],
        [verdict(n, refused=n % 5 > 0) for n in range(20)],
    ],
)
def test_a_refusal_for_now_is_waited_out(clock: Any, said: list[AutoscalerVerdict]) -> None:
    clock(list(said))
    placement_wait.wait(
        Group(18), 2, {"CPU": 1.0}, WaitLimits(600, lambda text: None, will_fit=False)
    )


def test_where_the_ring_is_known_to_fit_no_refusal_counts(clock: Any) -> None:
    clock([verdict(n, refused=True) for n in range(30)])
    placement_wait.wait(
        Group(25), 2, {"CPU": 1.0}, WaitLimits(600, lambda text: None, will_fit=True)
    )
