"""Reads the files of cluster/ for their tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.support.place import REPOSITORY

CLUSTER = REPOSITORY / "cluster"
LAUNCHED = ("aws", "gcp", "onprem")  # by `ray up`


def read(name: str) -> dict[str, Any]:
    """Returns a YAML file of cluster/."""
    return yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())


def cluster_spec() -> dict[str, Any]:
    """Returns the Ray cluster of cluster/kuberay/."""
    return read("kuberay/raycluster")["spec"]


def pods(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the templates of a cluster's pods, the head's first."""
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield group["template"]


def pinned(name: str) -> str:
    """Returns the version of a package in constraints.txt."""
    (version,) = re.findall(
        rf"^{name}==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE
    )
    return str(version)
