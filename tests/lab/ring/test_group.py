"""The Ray resources that a ring's actors take, on a real Ray with GPUs that exist by count only."""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING

import pytest
import ray

from ringray.lab.cluster.capacity import Capacity, NodeGroup, Placement
from ringray.lab.cluster.fit import Cluster
from ringray.lab.cluster.placement_wait import Patience
from ringray.lab.plan import plan
from ringray.lab.ring.group import ActorRing
from ringray.lab.spec import model as spec
from tests.support.place import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = 2


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A local Ray with as many GPUs as there are ranks."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = tempfile.mkdtemp(prefix="rr-")  # Ray's sockets lie in it: names must be short
    ray.init(
        num_cpus=RANKS, num_gpus=RANKS, include_dashboard=False, _temp_dir=folder,
        logging_level="ERROR", log_to_driver=False,
    )  # fmt: skip
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def free(prefix: str) -> float:
    """The free amount of all resources whose names begin with ``prefix``."""
    return sum(n for name, n in ray.available_resources().items() if name.startswith(prefix))


def test_each_actor_holds_the_gpu_that_its_placement_reserves(gpus: None) -> None:
    """A placement group turns GPUs into resources ``GPU_group_*``; actors that ask for none would
    leave these free, and see no device."""
    bundle = (("CPU", 1.0), ("GPU", 1.0))
    ring = ActorRing(RANKS, Placement("cpu", "PACK", bundle), 60.0, Patience(60.0))
    try:
        assert len(ring.ranks) == RANKS
        wait_until("the GPUs of the node are taken", lambda: free("GPU") == 0, 20)
        assert free("GPU_group") == 0
    finally:
        ring.close()
    wait_until("the GPUs are given back", lambda: free("GPU") == RANKS, 20)


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
