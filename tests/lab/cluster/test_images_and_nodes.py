"""Images and nodes of cluster/: packages, libraries, limits of memory and files."""

from __future__ import annotations

import json
import re

from tests.support.cluster_files import CLUSTER, LAUNCHED, MANIFESTS, cluster_spec, read


def test_the_object_store_is_capped_wherever_ray_starts() -> None:
    """By default it takes 30% of the memory, which ranks need."""
    starts = []
    for name in MANIFESTS:
        spec = cluster_spec(name)
        groups = spec["headGroupSpec"], *spec["workerGroupSpecs"]
        starts += [json.dumps(group["rayStartParams"]) for group in groups]
    for name in LAUNCHED:
        config = read(name)
        starts += [config[f"{node}_start_ray_commands"][-1] for node in ("head", "worker")]
    starts += [(CLUSTER / name).read_text() for name in ("slurm.sh", "multihost.py", "local.py")]
    for options in starts:
        assert re.search(r"object.store.memory\W", options), options
