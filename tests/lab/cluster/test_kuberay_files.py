"""The files under cluster/kuberay/: what Kubernetes and Ray read, and that they are private."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler._private.util import validate_config

from ringray.lab.cluster import capacity
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from tests.support.cluster_files import (
    CLUSTER,
    MANIFESTS,
    cluster_spec,
    pinned,
    pods,
    read,
    shared,
)
from tests.support.place import REPOSITORY

HEAD = Capacity((NodeGroup("head", {}, 1, head=True),))
GPU = {"CPU": 1.0, "GPU": 1.0}

# The parts of KubeRay's definitions (ray.io/v1, as of KubeRay 1.7) that our manifests use; a key
# that stands nowhere here was not looked up.

TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
QUANTITY = {"type": ["string", "integer"]}
LABELS = {"type": "object", "additionalProperties": TEXT}
POD = {"type": "object"}  # Kubernetes' own definition is asked


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(required),
        "additionalProperties": False,
    }  # fmt: skip


def listed(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


RESOURCES = closed(
    requests={"type": "object", "additionalProperties": QUANTITY},
    limits={"type": "object", "additionalProperties": QUANTITY},
)
LOCKED = closed(
    allowPrivilegeEscalation=FLAG, runAsNonRoot=FLAG, runAsUser=WHOLE,
    capabilities=closed(drop=listed(TEXT)), seccompProfile=closed(("type",), type=TEXT),
)  # fmt: skip
CLUSTER_SPEC = closed(
    ("headGroupSpec",), rayVersion=TEXT, enableInTreeAutoscaling=FLAG,
    authOptions=closed(mode={"enum": ["disabled", "token"]}),
    autoscalerOptions=closed(
        version={"enum": ["v1", "v2"]}, idleTimeoutSeconds=WHOLE, securityContext=LOCKED,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]}, resources=RESOURCES,
    ),
    headGroupSpec=closed(
        ("template",), serviceType=TEXT, enableIngress=FLAG, rayStartParams=LABELS,
        template=POD,
    ),
    workerGroupSpecs=listed(closed(
        ("groupName", "minReplicas", "maxReplicas", "template"), groupName=TEXT, replicas=WHOLE,
        minReplicas=WHOLE, maxReplicas=WHOLE, rayStartParams=LABELS, template=POD,
    )),
)  # fmt: skip
MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
KINDS = {
    "RayCluster": CLUSTER_SPEC,
    "RayJob": closed(
        entrypoint=TEXT, submissionMode={"enum": list(MODES)}, shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=WHOLE, backoffLimit=WHOLE, rayClusterSpec=CLUSTER_SPEC,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MANIFESTS)
def test_it_has_the_shape_of_its_definition(name: str) -> None:
    manifest = read(f"kuberay/{name}")
    assert manifest["apiVersion"] == "ray.io/v1"
    shape = KINDS[manifest["kind"]]
    jsonschema.validate(manifest["spec"], shape)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest["spec"] | {"suspendd": True}, shape)


@pytest.mark.parametrize("name", MANIFESTS)
def test_rays_autoscaler_reads_gpu_groups_that_start_at_nothing(name: str) -> None:
    manifest = {
        "metadata": {"name": "ringray", "namespace": "team"},
        "spec": cluster_spec(name),
    }
    config = autoscaling_config._derive_autoscaling_config_from_ray_cr(manifest)
    validate_config(config)
    types = config["available_node_types"]
    assert types[config["head_node_type"]]["resources"]["CPU"] == 0
    workers = [given for key, given in types.items() if key != config["head_node_type"]]
    assert [given["min_workers"] for given in workers] == [0, 0, 0, 0]
    assert [given["max_workers"] for given in workers] == [8, 2, 0, 0]
    assert [given["resources"]["GPU"] for given in workers] == [1, 8, 8, 8]
    assert capacity.from_config(config, HEAD).ranks(GPU) == 8 * 1 + 2 * 8


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_are_private_and_locked_down(name: str) -> None:
    spec = cluster_spec(name)
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
        assert (
            container["securityContext"]["runAsUser"] == 1000
        )  # a name is refused as perhaps root
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


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_accepts_its_pods(name: str) -> None:
    for template in pods(cluster_spec(name)):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {"name": "ringray"} | pod["metadata"]
        kubernetes_validate.validate(pod, "1.30", strict=True)
        wrong = pod | {"spec": pod["spec"] | {"hostNetwrok": True}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, "1.30", strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_only_the_head_has_the_store_and_all_pods_have_the_data(name: str) -> None:
    """The store is a sqlite file: it belongs on a volume of one node."""
    access = {
        claim["metadata"]["name"]: claim["spec"]["accessModes"]
        for claim in shared()
        if claim["kind"] == "PersistentVolumeClaim"
    }
    assert access == {"ringray-results": ["ReadWriteOnce"], "ringray-data": ["ReadWriteMany"]}
    for number, pod in enumerate(pods(cluster_spec(name))):
        (container,) = pod["spec"]["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["data"] == "/data"
        assert ("results" in mounts) == (number == 0)
        assert pod["spec"]["securityContext"]["fsGroup"] == 100  # or user 1000 cannot write there


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_group_of_several_gpus_reaches_its_fabric_or_says_that_it_takes_tcp(name: str) -> None:
    """Pinned memory and a device in each, and nodes near each other."""
    text = (CLUSTER / "kuberay" / "raycluster.yaml").read_text()
    for group in cluster_spec(name)["workerGroupSpecs"]:
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
    jsonschema.validate(monitor["spec"], closed(
        ("selector", "podMetricsEndpoints"), selector=closed(matchLabels=LABELS),
        podTargetLabels=listed(TEXT), podMetricsEndpoints=listed(closed(
            ("port",), port=TEXT, interval=TEXT, scrapeTimeout=TEXT,
        )),
    ))  # fmt: skip
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    policy, *_ = shared()
    (port,) = {
        port["containerPort"]
        for name in MANIFESTS
        for pod in pods(cluster_spec(name))
        for port in pod["spec"]["containers"][0]["ports"]
        if port["name"] == endpoint["port"]
    }
    for name in MANIFESTS:
        for pod in pods(cluster_spec(name)):
            chosen = monitor["spec"]["selector"]["matchLabels"].items()
            assert chosen <= pod["metadata"]["labels"].items()
            (container,) = pod["spec"]["containers"]
            assert endpoint["port"] in [one["name"] for one in container["ports"]]
    (rule,) = [
        rule
        for rule in policy["spec"]["ingress"]
        if port in [p["port"] for p in rule.get("ports", ())]
    ]
    (source,) = rule["from"]
    assert {"namespaceSelector", "podSelector"} <= source.keys()  # both, in one element


@pytest.mark.parametrize("name", MANIFESTS)
def test_versions_are_those_of_the_constraints(name: str) -> None:
    spec = cluster_spec(name)
    assert spec["rayVersion"] == pinned("ray")
    project = (REPOSITORY / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert version is not None
    images = {container["image"] for pod in pods(spec) for container in pod["spec"]["containers"]}
    assert images == {f"REGISTRY/ringray:{version[1]}"}


@pytest.mark.parametrize("name", MANIFESTS)
def test_workers_have_gpus_memory_for_nccl_and_no_way_to_kubernetes(name: str) -> None:
    _, whole, spot, _ = groups = cluster_spec(name)["workerGroupSpecs"]
    for group in groups:
        pod = group["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod[
            "tolerations"
        ]
        mounts = pod["containers"][0]["volumeMounts"]
        assert {"name": "shared", "mountPath": "/dev/shm"} in mounts
        assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
    chosen = whole["template"]["spec"]["nodeSelector"]
    assert "H100" in chosen["nvidia.com/gpu.product"]
    assert spot["template"]["spec"]["nodeSelector"] == chosen | {
        "karpenter.sh/capacity-type": "spot"
    }
    assert spot["template"]["spec"]["containers"] == whole["template"]["spec"]["containers"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_complete_definitions_accept_it(name: str) -> None:
    """RINGRAY_KUBERAY_CRDS: a folder with KubeRay's helm-chart/kuberay-operator/crds."""
    if not (folder := os.environ.get("RINGRAY_KUBERAY_CRDS")):
        pytest.skip("RINGRAY_KUBERAY_CRDS names no folder")
    manifest = read(f"kuberay/{name}")
    text = (Path(folder) / f"ray.io_{name}s.yaml").read_text()
    (schema,) = [
        version["schema"]["openAPIV3Schema"]
        for version in yaml.safe_load(text)["spec"]["versions"]
        if version["name"] == "v1"
    ]
    jsonschema.validate(manifest["spec"], _strict(schema["properties"]["spec"]))


def _strict(schema: Any) -> Any:
    """Refuses unknown keys, as `kubectl` does, and knows Kubernetes' type of quantities."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return QUANTITY
    made = {key: _strict(value) for key, value in schema.items()}
    if made.get("type") == "object" and "properties" in made:
        made.setdefault("additionalProperties", False)
    return made


def test_both_manifests_have_one_cluster() -> None:
    assert cluster_spec("raycluster") == cluster_spec("rayjob")
