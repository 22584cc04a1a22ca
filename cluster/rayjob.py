"""Prints one sweep as a Kubernetes job: a Ray cluster starts for it, grows for its rings and is
deleted when it ends; results stay on the volume.

    kubectl apply -f cluster/kuberay/network.yaml
    python cluster/rayjob.py experiments/quickstart.yaml | kubectl create -f -

The spec is a file of the image. The cluster, what it needs and what to replace are as in
cluster/kuberay/raycluster.yaml. A job that is created again continues its sweep: the store on the
volume holds the measured trials.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import yaml

CLUSTER = Path(__file__).parent / "kuberay" / "raycluster.yaml"


def manifest(spec: str) -> dict[str, Any]:
    """Returns the RayJob that runs ``spec``."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        # A name that is generated: the same sweep can be created again, which continues it.
        "metadata": {"generateName": "ringray-"},
        "spec": {
            "entrypoint": shlex.join(["python", "-m", "ringray", "run", spec]),
            "submissionMode": "SidecarMode",  # inside the head's pod: no other pod needs access
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 60,
            "backoffLimit": 0,
            "rayClusterSpec": yaml.safe_load(CLUSTER.read_text(encoding="utf-8"))["spec"],
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prints a sweep as a RayJob of Kubernetes.")
    parser.add_argument("spec", metavar="SPEC", help="a spec in the image")
    print(json.dumps(manifest(parser.parse_args().spec), indent=2))
