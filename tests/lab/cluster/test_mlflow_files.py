"""cluster/mlflow: what is open, where secrets are, and which versions run."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.place import REPOSITORY

CLUSTER = REPOSITORY / "cluster"
FOLDER = CLUSTER / "mlflow"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return found


def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """Returns Kubernetes' objects by kind and name."""
    found = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


# Compose


def test_compose_opens_the_loopback_alone() -> None:
    services = compose()["services"]
    assert services["mlflow"]["ports"] == ["127.0.0.1:5000:5000"]
    assert "ports" not in services["postgres"]
    assert services["postgres"]["networks"] == ["database"]
    assert compose()["networks"]["database"] == {"internal": True}
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["healthcheck"]["test"]
        assert {*service["secrets"]} <= {*compose()["secrets"]}
    assert services["postgres"]["user"] == "postgres"
    assert services["mlflow"]["read_only"] is True


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml", "auth.ini"])
def test_no_password_stands_in_a_file(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert not re.search(r"://[^/\s]+:[^/\s]+@", text)
    assert not re.search(r"(?i)password['\"]?\s*[:=]\s*(?!\$|/run/secrets/)\w", text)


# Kubernetes


@pytest.mark.parametrize("path", ["mlflow/kubernetes.yaml", "kuberay/network.yaml"])
def test_kubernetes_accepts_it(path: str) -> None:
    for one in yaml.safe_load_all((CLUSTER / path).read_text()):
        kubernetes_validate.validate(one, "1.30", strict=True)
        wrong = one | {"spec": one["spec"] | {"replicass": 1}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, "1.30", strict=True)


def test_kubernetes_opens_nothing_to_the_outside() -> None:
    found = manifests()
    for (kind, name), one in found.items():
        assert kind in ("Deployment", "StatefulSet", "Service", "NetworkPolicy"), name
        if kind == "Service":
            assert one["spec"].get("type", "ClusterIP") == "ClusterIP"
        if kind == "NetworkPolicy":
            assert one["spec"]["policyTypes"] == ["Ingress"]
            assert all(rule["from"] and rule["ports"] for rule in one["spec"]["ingress"])
        if kind in ("Deployment", "StatefulSet"):
            pod = one["spec"]["template"]["spec"]
            assert pod["automountServiceAccountToken"] is False
            assert pod["securityContext"]["runAsNonRoot"] is True
            (container,) = pod["containers"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["limits"]
    policies = {
        one["spec"]["podSelector"]["matchLabels"]["app"]: one["spec"]["ingress"]
        for (kind, _), one in found.items()
        if kind == "NetworkPolicy"
    }
    labels = found["Deployment", "ringray-mlflow"]["spec"]["template"]["metadata"]["labels"]
    assert policies["ringray-postgres"][0]["from"] == [{"podSelector": {"matchLabels": labels}}]
    assert policies.keys() == {"ringray-postgres", "ringray-mlflow"}
