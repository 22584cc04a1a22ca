"""The files under cluster/: what Ray and KubeRay read in them, and that they are private."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler._private.util import prepare_config, validate_config

from ringray.lab.cluster import capacity
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from tests.support.place import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

CLUSTER = REPOSITORY / "cluster"
GROWING = ("aws", "gcp", "local-autoscaling")
LAUNCHED = ("aws", "gcp", "onprem")
CHOICES = ("h100-spot", "h200", "gpu-8-spot")  # in place of others, so they begin without nodes
MANIFESTS = ("raycluster", "rayjob")
HEAD = Capacity((NodeGroup("head", {}, 1, head=True),))
GPU = {"CPU": 1.0, "GPU": 1.0}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())


def pinned(name: str) -> str:
    (version,) = re.findall(
        rf"^{name}==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE
    )
    return str(version)


# ray up


@pytest.mark.parametrize("name", sorted({*GROWING, *LAUNCHED}))
def test_ray_accepts_it(name: str) -> None:
    schema = json.loads(
        Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text(encoding="utf-8")
    )
    config = read(name)
    jsonschema.validate(config, schema)
    validate_config(prepare_config(config))
    with pytest.raises(jsonschema.ValidationError):  # so the schema is one that refuses
        jsonschema.validate(config | {"max_wokers": 4}, schema)


@pytest.mark.parametrize("name", GROWING)
def test_it_grows_from_a_head_without_work(name: str) -> None:
    config = read(name)
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])
    assert (head["resources"], head["max_workers"]) == ({"CPU": 0}, 0)
    assert types
    for key, given in types.items():
        assert given.get("min_workers", 0) == 0
        assert (key in CHOICES) == (given["max_workers"] == 0)
        assert given["max_workers"] <= config["max_workers"]
        assert given["resources"]["GPU"] > 0
    assert config["idle_timeout_minutes"] > 0


@pytest.mark.parametrize(
    ("name", "largest"), [("aws", 2 * 8 + 2), ("gcp", 2 * 8 + 2), ("local-autoscaling", 4)]
)
def test_ringray_reads_what_it_offers(name: str, largest: int) -> None:
    assert capacity.of_config(read(name), HEAD).ranks(GPU) == largest


def node_of(name: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = read(name)["available_node_types"][kind]["node_config"]
    return found


@pytest.mark.parametrize("name", ["aws", "gcp"])
def test_nodes_of_a_cloud_have_no_public_address(name: str) -> None:
    config = read(name)
    assert config["provider"]["use_internal_ips"] is True
    assert config["auth"]["ssh_proxy_use_node_id"] is True
    for kind, given in config["available_node_types"].items():
        node = given["node_config"]
        if name == "aws":  # a group that Ray makes itself lets everybody try SSH
            cards = node.get("NetworkInterfaces")
            places = [(card["SubnetId"], card["Groups"]) for card in cards or ()]
            own = {"SubnetIds", "SecurityGroupIds"} & node.keys()
            assert (len(own), bool(places)) in ((2, False), (0, True)), kind  # Ray refuses both
            assert not any(card.get("AssociatePublicIpAddress") for card in cards or ())
        else:
            assert all("accessConfigs" not in one for one in node["networkInterfaces"])


def test_ec2_nodes_of_eight_gpus_have_efa_on_every_card_beside_each_other() -> None:
    node = node_of("aws", "h100")
    assert node["Placement"]["GroupName"]
    first, *others = node["NetworkInterfaces"]
    assert (first["InterfaceType"], first["NetworkCardIndex"], first["DeviceIndex"]) == (
        "efa", 0, 0,
    )  # fmt: skip
    assert [card["NetworkCardIndex"] for card in others] == list(range(1, 32))
    assert {(card["InterfaceType"], card["DeviceIndex"]) for card in others} == {("efa-only", 1)}
    text = (CLUSTER / "aws.yaml").read_text()
    assert "all traffic from itself" in text
    start = read("aws")["worker_start_ray_commands"][-1]
    assert "FI_PROVIDER=efa" in start
    assert "ofi-nccl" in start


def test_gcp_nodes_of_eight_gpus_have_their_fabric_beside_each_other() -> None:
    def interfaces(kind: str) -> list[str]:
        found = node_of("gcp", kind)["networkInterfaces"]
        networks = [one["subnetwork"] for one in found]
        assert len({*networks}) == len(networks)  # Compute Engine refuses two in one
        return [one["nicType"] for one in found]

    assert interfaces("h100") == ["GVNIC"] * 5
    assert interfaces("h200") == ["GVNIC"] * 2 + ["MRDMA"] * 8
    for kind in ("h100", "h100-spot", "h200"):
        assert node_of("gcp", kind)["resourcePolicies"]
    fabric, start = read("gcp")["worker_start_ray_commands"][-1].split("; ")
    assert fabric == ". ~/ringray/cluster/gcp_fabric.sh"
    assert (CLUSTER / "gcp_fabric.sh").exists()
    assert " start " in start


@pytest.mark.parametrize(
    ("name", "asks"),
    [
        ("aws", {"InstanceMarketOptions": {"MarketType": "spot"}}),
        ("gcp", {"scheduling": {
            "onHostMaintenance": "TERMINATE", "provisioningModel": "SPOT",
            "instanceTerminationAction": "DELETE",
        }}),
    ],
)  # fmt: skip
def test_spot_nodes_are_the_others_at_another_price(name: str, asks: dict[str, Any]) -> None:
    types = read(name)["available_node_types"]
    regular, spot = types["h100"], types["h100-spot"]
    assert spot["node_config"] == regular["node_config"] | asks
    assert spot["resources"] == regular["resources"]


def test_machines_of_ones_own_are_reached_with_a_key() -> None:
    config = read("onprem")
    assert config["provider"]["type"] == "local"
    assert config["auth"].keys() == {"ssh_user", "ssh_private_key"}
    workers = prepare_config(config)["available_node_types"]["local.cluster.node"]
    assert workers["min_workers"] == len(config["provider"]["worker_ips"])


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launched_cluster_is_private(name: str) -> None:
    config = read(name)
    (start,) = (line for line in config["head_start_ray_commands"] if "--head" in line)
    assert "--dashboard-host=127.0.0.1" in start
    assert "--num-cpus=0" in start
    started = [
        line
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for line in config[key]
        if " start " in line
    ]
    assert len(started) == 2
    assert all(re.search(r"(^|; )RAY_AUTH_MODE=token ", line) for line in started)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "0.0.0.0" not in (CLUSTER / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", LAUNCHED)
def test_every_package_of_a_launched_cluster_is_pinned(name: str) -> None:
    config = read(name)
    commands = [*config["setup_commands"], *config.get("head_setup_commands", [])]
    assert "make -C ~/ringray setup" in commands  # which installs by constraints.txt
    for line in commands:
        if "pip install" in line:
            assert re.search(r"install -q [\w-]+==[\d.]+$", line)


# KubeRay. The parts of its CRDs (ray.io/v1, as of KubeRay 1.7) that our manifests use; a key that
# stands nowhere here was not looked up.

TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
QUANTITY = {"type": ["string", "integer"]}
LABELS = {"type": "object", "additionalProperties": TEXT}


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
CONTAINER = closed(
    ("name",), name=TEXT, image=TEXT, securityContext=LOCKED, resources=RESOURCES,
    ports=listed(closed(("containerPort",), containerPort=WHOLE, name=TEXT)),
    env=listed(closed(("name",), name=TEXT, value=TEXT)),
    volumeMounts=listed(closed(("name", "mountPath"), name=TEXT, mountPath=TEXT)),
)  # fmt: skip
VOLUME = closed(
    ("name",), name=TEXT, emptyDir=closed(medium=TEXT, sizeLimit=QUANTITY),
    persistentVolumeClaim=closed(("claimName",), claimName=TEXT),
)  # fmt: skip
TEMPLATE = closed(
    metadata=closed(labels=LABELS),
    spec=closed(
        ("containers",), containers=listed(CONTAINER), volumes=listed(VOLUME),
        securityContext=closed(fsGroup=WHOLE), automountServiceAccountToken=FLAG,
        tolerations=listed(closed(key=TEXT, operator=TEXT, value=TEXT, effect=TEXT)),
        nodeSelector=LABELS,
    ),
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
        template=TEMPLATE,
    ),
    workerGroupSpecs=listed(closed(
        ("groupName", "minReplicas", "maxReplicas", "template"), groupName=TEXT, replicas=WHOLE,
        minReplicas=WHOLE, maxReplicas=WHOLE, rayStartParams=LABELS, template=TEMPLATE,
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


def cluster_spec(name: str) -> dict[str, Any]:
    spec = read(f"kuberay/{name}")["spec"]
    return spec.get("rayClusterSpec", spec)


def pods(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield group["template"]


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
    assert [given["min_workers"] for given in workers] == [0, 0, 0]
    assert [given["max_workers"] for given in workers] == [8, 2, 0]
    assert [given["resources"]["GPU"] for given in workers] == [1, 8, 8]
    assert capacity.of_config(config, HEAD).ranks(GPU) == 8 * 1 + 2 * 8


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_are_private_and_locked_down(name: str) -> None:
    spec = cluster_spec(name)
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert spec["headGroupSpec"]["enableIngress"] is False
    policy, claim = yaml.safe_load_all((CLUSTER / "kuberay" / "network.yaml").read_text())
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
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        for volume in pod["spec"]["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


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
    small, whole, spot = cluster_spec(name)["workerGroupSpecs"]
    for group in (small, whole, spot):
        pod = group["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod[
            "tolerations"
        ]
        (mount,) = pod["containers"][0]["volumeMounts"]
        assert mount == {"name": "shared", "mountPath": "/dev/shm"}
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


def test_the_image_has_the_versions_of_the_constraints() -> None:
    text = (CLUSTER / "Dockerfile").read_text()
    assert re.findall(r"^ARG RAY=([\d.]+)-", text, re.MULTILINE) == [pinned("ray")]
    installs = re.findall(r"pip install .*\\\n(.*)", text)
    assert len(installs) == 2
    assert all("-c /home/ray/ringray/constraints.txt" in line for line in installs)
    assert re.findall(r"^USER (\w+)", text, re.MULTILINE)[-1] == "1000"


def test_both_manifests_have_one_cluster() -> None:
    assert cluster_spec("raycluster") == cluster_spec("rayjob")
