"""The Ray resources that a ring's actors take, on a real Ray with GPUs that exist by count only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringray.lab.cluster.capacity import Capacity, NodeGroup
from ringray.lab.cluster.fit import Cluster
from ringray.lab.plan import plan
from ringray.lab.ring.actor import RankInfo
from ringray.lab.ring.group import mixed_versions
from ringray.lab.specs import model as spec
from ringray.tuning.table import Place

ROOT = Path(__file__).resolve().parents[3]
# A placement group turns GPUs into resources ``GPU_group_*``; actors that ask for none would leave
# these free, and see no device. A process of its own: Ray reads its authentication mode only once.
RING_ON_GPUS = """
import shutil, tempfile
import ray
from ringray.lab.cluster.capacity import Placement
from ringray.lab.cluster.placement_wait import WaitLimits
from ringray.lab.ring.group import ActorRing
from tests.support.place import wait_until

def free(prefix):
    return sum(n for name, n in ray.available_resources().items() if name.startswith(prefix))

folder = tempfile.mkdtemp(prefix="rr-")  # Ray's sockets are in it: names must be short
ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, _temp_dir=folder,
         logging_level="ERROR", log_to_driver=False)
try:
    bundle = (("CPU", 1.0), ("GPU", 1.0))
    ring = ActorRing(2, Placement("cpu", "PACK", bundle), 60.0, WaitLimits(60.0))
    assert len(ring.ranks) == 2
    wait_until("the GPUs of the node are taken", lambda: free("GPU") == 0)
    assert free("GPU_group") == 0
    ring.close()
    wait_until("the GPUs are released", lambda: free("GPU") == 2)
finally:
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
"""


@pytest.mark.exhaustive
def test_each_actor_holds_the_gpu_that_its_placement_reserves(tmp_path: Path) -> None:
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    given.pop("CUDA_VISIBLE_DEVICES", None)
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", RING_ON_GPUS],
        env={**given, "HOME": str(tmp_path), "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("device", "bundle"),
    [
        ("cuda", {"CPU": 1.0, "GPU": 1.0}),
        ("auto", {"CPU": 1.0, "GPU": 1.0}),
        ("cpu", {"CPU": 1.0}),
    ],
)
def test_a_rank_on_a_gpu_asks_for_one(device: str, bundle: dict[str, float]) -> None:
    text = f"version: 1\nname: a\nkind: latency\nring: {{size: 2, device: {device}}}\n"
    (trial,) = plan.build(spec.parse(text + "problem: {seq_len: 64}\n")).trials
    node = NodeGroup("node", {"CPU": 8.0, "GPU": 8.0})
    placement = Cluster(False, Capacity((node,))).placement(trial.config)
    assert dict(placement.bundle) == bundle
    assert placement.device == ("cpu" if device == "cpu" else "cuda")


def introduced(address: str, torch: str, triton: str = "3.9.0") -> RankInfo:
    return RankInfo(address, "c", Place("cpu", "k", torch, triton), "")


def test_a_ring_of_mixed_versions_is_refused_by_node_and_version() -> None:
    one, same = introduced("10.0.0.1", "2.13.0+cu130"), introduced("10.0.0.2", "2.13.0+cu130")
    assert mixed_versions([one, same], "2.13.0+cpu") is None  # a driver without a GPU
    assert mixed_versions([one], None) is None
    for other in (
        introduced("10.0.0.3", "2.12.1+cu130"),
        introduced("10.0.0.3", "2.13.0+cu128"),
        introduced("10.0.0.3", "2.13.0+cu130", "3.8.0"),
    ):
        said = mixed_versions([one, same, other], "2.13.0")
        assert said is not None
        assert "10.0.0.1 has torch 2.13.0+cu130, triton 3.9.0; " in said
        assert f"10.0.0.3 has torch {other.place.torch}, triton {other.place.triton}; " in said
    assert "this driver has torch 2.12.0;" in str(mixed_versions([one], "2.12.0"))
