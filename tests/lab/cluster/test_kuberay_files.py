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
    cluster_spec,
    pinned,
    pods,
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
