"""Requests of a rank to Ray, and rings whose nodes have several versions."""

from __future__ import annotations

import pytest

from ringray.lab.cluster.capacity import Capacity, NodeGroup
from ringray.lab.cluster.fit import Cluster
from ringray.lab.plan import plan
from ringray.lab.ring.actor import RankInfo
from ringray.lab.ring.group import mixed_versions
from ringray.lab.specs import model as spec
from ringray.tuning.table import Place


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
