"""Images and nodes of cluster/: packages, libraries, limits of memory and files."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

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


def test_a_node_of_slurm_raises_its_limits_and_says_which_one_rdma_lacks(tmp_path: Path) -> None:
    """Softly, never down, and never beyond the hard ones."""
    script = f"""
        eval "$(sed -n '/^raise()/,/^}}/p; /^limits()/,/^}}/p' {CLUSTER / "slurm.sh"})"
        ulimit -Sn 128; ulimit -Hn 900; ulimit -l 32; ulimit -Ss 1024
        limits {tmp_path}
        echo $(ulimit -n) $(ulimit -s)
        touch {tmp_path}/mlx5_0
        limits {tmp_path}"""
    done = subprocess.run(["bash", "-uc", script], capture_output=True, text=True, check=True)
    files, stack = done.stdout.split()
    assert files == "900"
    assert stack == "unlimited" or int(stack) > 1024
    assert done.stderr.count("may pin 32 KiB of memory, and RDMA needs no limit") == 1
