"""The files under cluster/: what Ray, Kubernetes and Prometheus read in them; they are private."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.kuberay import autoscaling_config
from ray.autoscaler._private.util import prepare_config, validate_config

from ringray.lab.cluster import capacity
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from tests.support.cluster_files import CLUSTER, LAUNCHED, cluster_spec, pinned, pods, read
from tests.support.prometheus import BOARD, CONFIG, expressions

SPEC = cluster_spec()
HEAD = Capacity((NodeGroup("head", {}, 1, head=True),))
GPU = {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize("name", [*LAUNCHED, "local-autoscaling"])
def test_ray_up_accepts_it(name: str) -> None:
    schema = json.loads(
        Path(ray.autoscaler.__file__).with_name("ray-schema.json").read_text(encoding="utf-8")
    )
    config = read(name)
    jsonschema.validate(config, schema)
    validate_config(prepare_config(config))
    with pytest.raises(jsonschema.ValidationError):  # so the schema is one that refuses
        jsonschema.validate(config | {"max_wokers": 4}, schema)


@pytest.mark.parametrize(("name", "ranks"), [("aws", 18), ("gcp", 18), ("local-autoscaling", 4)])
def test_it_grows_from_a_head_without_work(name: str, ranks: int) -> None:
    config = read(name)
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])
    assert (head["resources"], head["max_workers"]) == ({"CPU": 0}, 0)
    assert [node_type.get("min_workers", 0) for node_type in types.values()] == [0] * len(types)
    assert capacity.from_config(read(name), HEAD).ranks(GPU) == ranks


def test_kuberay_grows_from_a_head_without_work() -> None:
    assert SPEC["rayVersion"] == pinned("ray")
    manifest = {"metadata": {"name": "ringray", "namespace": "team"}, "spec": SPEC}
    config = autoscaling_config._derive_autoscaling_config_from_ray_cr(manifest)
    validate_config(config)
    types = config["available_node_types"]
    head = types.pop(config["head_node_type"])
    assert head["resources"]["CPU"] == 0
    assert [node_type["min_workers"] for node_type in types.values()] == [0] * 4
    config = autoscaling_config._derive_autoscaling_config_from_ray_cr(manifest)
    assert capacity.from_config(config, HEAD).ranks(GPU) == 8 * 1 + 2 * 8


def test_a_job_of_kubernetes_runs_its_spec_on_that_cluster() -> None:
    command = [sys.executable, str(CLUSTER / "rayjob.py"), "experiments/my spec.yaml"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = json.loads(printed)["spec"]
    assert job["rayClusterSpec"] == SPEC
    assert job["entrypoint"] == "python -m ringray run 'experiments/my spec.yaml'"


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_launched_cluster_is_private(name: str) -> None:
    config = read(name)
    nodes = ("head", "worker")
    started = [config[f"{node}_start_ray_commands"][-1] for node in nodes]
    assert all(re.search(r"(^|; )RAY_AUTH_MODE=token ", line) for line in started)
    assert "--dashboard-host=127.0.0.1" in started[0]
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "0.0.0.0" not in (CLUSTER / f"{name}.yaml").read_text()


def test_pods_of_kuberay_are_private_and_locked_down() -> None:
    assert SPEC["authOptions"] == {"mode": "token"}
    assert SPEC["headGroupSpec"]["serviceType"] == "ClusterIP"
    for template in pods(SPEC):
        (container,) = template["spec"]["containers"]
        assert container["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = {"name": "ringray"} | pod["metadata"]
        kubernetes_validate.validate(pod, "1.30", strict=True)


@pytest.mark.parametrize("path", ["mlflow/kubernetes.yaml", "kuberay/network.yaml"])
def test_kubernetes_accepts_it_and_opens_nothing_to_the_outside(path: str) -> None:
    for document in yaml.safe_load_all((CLUSTER / path).read_text()):
        kubernetes_validate.validate(document, "1.30", strict=True)
        if document["kind"] == "Service":
            assert document["spec"].get("type", "ClusterIP") == "ClusterIP"
        if document["kind"] == "NetworkPolicy":
            assert document["spec"]["policyTypes"] == ["Ingress"]
            assert all(rule["from"] for rule in document["spec"]["ingress"])


def test_mlflow_opens_the_loopback_alone_and_no_password_stands_in_a_file() -> None:
    services = yaml.safe_load((CLUSTER / "mlflow" / "compose.yaml").read_text())["services"]
    assert services["mlflow"]["ports"] == ["127.0.0.1:5000:5000"]
    assert "ports" not in services["postgres"]
    for name in ("compose.yaml", "kubernetes.yaml", "auth.ini"):
        text = (CLUSTER / "mlflow" / name).read_text()
        assert not re.search(r"://[^/\s]+:[^/\s]+@", text)
        assert not re.search(r"(?i)password['\"]?\s*[:=]\s*(?!\$|/run/secrets/)\w", text)


def test_the_dashboard_is_the_generated_one() -> None:
    code = "import dashboard; print(dashboard.text(), end='')"
    done = subprocess.run([sys.executable, "-c", code], cwd=CLUSTER, capture_output=True, text=True)
    assert done.stdout == BOARD.read_text(), f"python cluster/dashboard.py {done.stderr}"


@pytest.mark.prometheus
def test_promtool_reads_every_expression(tmp_path: Path) -> None:
    def check(texts: list[str]) -> int:
        rules = [{"record": f"chart:{number}", "expr": text} for number, text in enumerate(texts)]
        file = tmp_path / "rules.yaml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "charts", "rules": rules}]}))
        return subprocess.run(["promtool", "check", "rules", file], capture_output=True).returncode

    assert check(list(expressions().values())) == 0
    assert check(["max by (sweep (ray_ringray_trials)"]) != 0


@pytest.mark.prometheus
def test_promtool_reads_the_configuration() -> None:
    done = subprocess.run(["promtool", "check", "config", CONFIG], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
