"""The files under cluster/kuberay/: what Kubernetes and Ray read, and that they are private."""

from __future__ import annotations

import re

import kubernetes_validate
import pytest
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler._private.util import validate_config

from ringray.lab.cluster import capacity
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from tests.support.cluster_files import (
    CLUSTER,
    cluster_spec,
    pinned,
    pods,
    read,
    shared,
)
from tests.support.place import REPOSITORY

SPEC = cluster_spec("raycluster")
HEAD = Capacity((NodeGroup("head", {}, 1, head=True),))
GPU = {"CPU": 1.0, "GPU": 1.0}


def test_both_manifests_have_one_cluster_of_the_versions_of_the_constraints() -> None:
    assert cluster_spec("rayjob") == SPEC
    assert SPEC["rayVersion"] == pinned("ray")
    project = (REPOSITORY / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert version is not None
    images = {container["image"] for pod in pods(SPEC) for container in pod["spec"]["containers"]}
    assert images == {f"REGISTRY/ringray:{version[1]}"}


def test_rays_autoscaler_reads_gpu_groups_that_start_at_nothing() -> None:
    manifest = {"metadata": {"name": "ringray", "namespace": "team"}, "spec": SPEC}
    config = autoscaling_config._derive_autoscaling_config_from_ray_cr(manifest)
    validate_config(config)
    types = config["available_node_types"]
    assert types[config["head_node_type"]]["resources"]["CPU"] == 0
    workers = [given for key, given in types.items() if key != config["head_node_type"]]
    assert [given["min_workers"] for given in workers] == [0, 0, 0, 0]
    assert [given["max_workers"] for given in workers] == [8, 2, 0, 0]
    assert [given["resources"]["GPU"] for given in workers] == [1, 8, 8, 8]
    assert capacity.from_config(config, HEAD).ranks(GPU) == 8 * 1 + 2 * 8


def test_pods_are_private_and_locked_down() -> None:
    spec = SPEC
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert spec["headGroupSpec"]["enableIngress"] is False
    policy, *claims = shared()
    chosen = policy["spec"]["podSelector"]["matchLabels"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    everyone = [rule for rule in policy["spec"]["ingress"] if not rule.get("from")]
    assert everyone == []
    for pod in pods(spec):
        assert chosen.items() <= pod["metadata"]["labels"].items()
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["runAsUser"] == 1000  # a name may be that of root
        assert container["resources"]["limits"] == container["resources"]["requests"]
        capabilities = container["securityContext"]["capabilities"]
        assert capabilities["drop"] == ["ALL"]
        assert capabilities.get("add") in (None, ["IPC_LOCK"])
        claimed = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        assert claimed <= {claim["metadata"]["name"] for claim in claims}


def test_kubernetes_accepts_its_pods() -> None:
    for template in pods(SPEC):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {"name": "ringray"} | pod["metadata"]
        kubernetes_validate.validate(pod, "1.30", strict=True)
        wrong = pod | {"spec": pod["spec"] | {"hostNetwrok": True}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, "1.30", strict=True)


def test_only_the_head_has_the_store_and_all_pods_have_the_data() -> None:
    """The store is a sqlite file: it belongs on a volume of one node."""
    access = {
        claim["metadata"]["name"]: claim["spec"]["accessModes"]
        for claim in shared()
        if claim["kind"] == "PersistentVolumeClaim"
    }
    assert access == {"ringray-results": ["ReadWriteOnce"], "ringray-data": ["ReadWriteMany"]}
    for number, pod in enumerate(pods(SPEC)):
        (container,) = pod["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["data"] == "/data"
        assert ("results" in mounts) == (number == 0)
        assert pod["spec"]["securityContext"]["fsGroup"] == 100  # or user 1000 cannot write there


def test_a_group_of_several_gpus_reaches_its_fabric_or_says_that_it_takes_tcp() -> None:
    """Pinned memory and a device in each, and nodes near each other."""
    text = (CLUSTER / "kuberay" / "raycluster.yaml").read_text()
    for group in SPEC["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        limits = container["resources"]["limits"]
        fabric = {key for key in limits if key.startswith(("vpc.amazonaws.com/efa", "rdma/"))}
        assert group["template"]["spec"]["affinity"]["podAffinity"]
        if int(limits["nvidia.com/gpu"]) == 1 and not fabric:
            assert f"`{group['groupName']}` takes TCP" in text
            continue
        assert len(fabric) == 1, group["groupName"]
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        efa = fabric == {"vpc.amazonaws.com/efa"}
        assert ("hugepages-2Mi" in limits) == efa
        assert ({"name": "FI_PROVIDER", "value": "efa"} in container["env"]) == efa
        if efa:  # which does not leave its zone
            (term,) = spec["affinity"]["podAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"
            ]
            chosen = term["labelSelector"]["matchLabels"]
            assert chosen.items() <= group["template"]["metadata"]["labels"].items()
            assert term["topologyKey"] == "topology.kubernetes.io/zone"


def test_prometheus_finds_the_metrics_of_all_pods_and_is_let_in() -> None:
    monitor = read("kuberay/monitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = set()
    for pod in pods(SPEC):
        chosen = monitor["spec"]["selector"]["matchLabels"].items()
        assert chosen <= pod["metadata"]["labels"].items()
        (container,) = pod["spec"]["containers"]
        ports |= {
            port["containerPort"] for port in container["ports"] if port["name"] == endpoint["port"]
        }
    (port,) = ports
    policy, *_ = shared()
    (rule,) = (
        rule
        for rule in policy["spec"]["ingress"]
        if port in [allowed["port"] for allowed in rule.get("ports", ())]
    )
    (source,) = rule["from"]
    assert {"namespaceSelector", "podSelector"} <= source.keys()  # both, in one element


def test_workers_have_gpus_memory_for_nccl_and_no_way_to_kubernetes() -> None:
    _, whole, spot, _ = groups = SPEC["workerGroupSpecs"]
    for group in groups:
        pod = group["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        gpus = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        assert gpus in pod["tolerations"]
        assert {"name": "shared", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
        assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
    chosen = whole["template"]["spec"]["nodeSelector"]
    assert "H100" in chosen["nvidia.com/gpu.product"]
    preempted = {"karpenter.sh/capacity-type": "spot"}
    assert spot["template"]["spec"]["nodeSelector"] == chosen | preempted
    assert spot["template"]["spec"]["containers"] == whole["template"]["spec"]["containers"]
