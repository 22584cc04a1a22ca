"""Present and possible nodes of a cluster, the rings that fit on them, refusals; and which machines
the rings of a run hold, and may share."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import yaml

from ringray.base.errors import SpecError
from ringray.lab.cluster import capacity
from ringray.lab.cluster.capacity import HEAD, Capacity, NodeGroup, Placement
from ringray.lab.cluster.fit import Cluster
from ringray.lab.cluster.machines import Machines
from ringray.lab.plan import plan
from ringray.lab.specs import model as spec
from tests.support.place import REPOSITORY

GPU = {"CPU": 1.0, "GPU": 1.0}
CONFIG = yaml.safe_load((REPOSITORY / "cluster" / "local-autoscaling.yaml").read_text())
EMPTY = Capacity((NodeGroup("head", {}, 1, head=True),))


def node(name: str = "", alive: bool = True, address: str = "", **resources: float) -> Any:
    has = {"memory": 1e9, **resources}
    return {
        "NodeID": name, "NodeManagerAddress": address or name, "Alive": alive, "Resources": has,
    }  # fmt: skip


def build(ring: str, lengths: str = "64") -> plan.Plan:
    head = f"version: 1\nname: a\nkind: latency\nring: {ring}\n"
    return plan.build(spec.parse(f"{head}problem: {{seq_len: {lengths}}}\n"))


def config(ring: str) -> Any:
    (trial,) = build(ring).trials
    return trial.config


# Rings on nodes


def brute(groups: tuple[NodeGroup, ...], most: int, bundle: dict[str, float], strategy: str) -> int:
    """The largest ring over every choice of at most ``most`` workers."""
    nodes = [group for group in groups for _ in range(int(group.limit))]
    best = 0
    for chosen in range(2 ** len(nodes)):
        here = [one for at, one in enumerate(nodes) if chosen >> at & 1]
        if sum(not one.head for one in here) > most:
            continue
        held = [
            min(math.floor(one.resources.get(name, 0) / need) for name, need in bundle.items())
            for one in here
        ]
        if strategy == "STRICT_PACK":
            best = max(best, *held, 0)
        elif strategy == "STRICT_SPREAD":
            best = max(best, sum(map(bool, held)))
        else:
            best = max(best, sum(held))
    return best


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_the_largest_ring_is_that_of_the_best_choice_of_nodes(strategy: str) -> None:
    dice = random.Random(7)
    for _ in range(60):
        groups = tuple(
            NodeGroup(f"g{at}", {"CPU": dice.randint(0, 5), "GPU": dice.randint(0, 3)}, count, head)
            for at, (count, head) in enumerate(
                [(1, True), (dice.randint(0, 3), False), (dice.randint(0, 3), False)]
            )
        )
        most = dice.randint(0, 5)
        bundle = {"CPU": float(dice.randint(1, 2)), "GPU": float(dice.randint(0, 1))}
        bundle = {name: need for name, need in bundle.items() if need}
        found = Capacity(groups, most).ranks(bundle, strategy)
        assert found == brute(groups, most, bundle, strategy), (groups, most, bundle)


# From Ray's answers to a capacity


def test_nodes_that_are_alike_are_one_group() -> None:
    present = capacity.from_nodes(
        [node(**{HEAD: 1.0}), node(**GPU), node(**GPU), node(alive=False, **GPU), node(CPU=8.0)]
    )
    assert str(present) == "2 × node (1 CPU, 1 GPU), 1 × node (8 CPU)"
    assert present.ranks(GPU) == 2
    assert present.ranks({"CPU": 1.0}) == 10


def test_a_configuration_offers_its_workers_and_the_head_that_there_is() -> None:
    offer = capacity.from_config(CONFIG, EMPTY)
    assert (offer.ranks(GPU), offer.ranks({"CPU": 1.0}), offer.has("GPU")) == (4, 4, True)
    assert str(offer) == "4 × gpu (1 CPU, 1 GPU)"
    head = Capacity((NodeGroup("head", {"CPU": 8.0}, 1, head=True),))
    assert capacity.from_config(CONFIG, head).ranks({"CPU": 1.0}) == 12
    # Nodes that run already are the autoscaler's own: they are not offered twice.
    grown = Capacity((*EMPTY.groups, NodeGroup("node", GPU, 4)))
    assert capacity.from_config(CONFIG, grown).ranks(GPU) == 4


def test_types_without_a_number_share_that_of_the_cluster() -> None:
    types = {
        "head": {"resources": {"CPU": 4}, "node_config": {}},
        "large": {"resources": {"CPU": 8, "GPU": 8}, "node_config": {}},
        "small": {"resources": GPU, "node_config": {}, "max_workers": 2},
    }
    offer = capacity.from_config(
        {"max_workers": 3, "head_node_type": "head", "available_node_types": types}, EMPTY
    )
    assert offer.ranks(GPU) == 24
    assert str(offer).endswith("at most 3 workers in all")
    alone = {"max_workers": 3, "available_node_types": {"all": types["small"]}}
    assert capacity.from_config(alone, EMPTY).ranks(GPU) == 2
    assert str(capacity.from_config({}, EMPTY)) == "1 × head (no CPU, no GPU)"
    endless = {"head_node_type": "head", "available_node_types": types}
    assert capacity.from_config(endless, EMPTY).ranks(GPU) == math.inf


# Refusals


def growing() -> tuple[Cluster, list[int]]:
    asked: list[int] = []

    def reach() -> Capacity:
        asked.append(1)
        return capacity.from_config(CONFIG, EMPTY)

    return Cluster(False, EMPTY, reach), asked


@pytest.mark.parametrize(
    ("ring", "field", "says"),
    [
        ("{size: 4, device: cpu}", None, ""),
        ("{size: 4, device: cuda, placement: strict-spread}", None, ""),
        ("{size: 4}", None, ""),
        ("{size: 5, device: cpu}", "ring.size",
         "needs 5 CPUs, the cluster can offer rings of up to 4: 4 × gpu (1 CPU, 1 GPU)"),
        ("{size: 5, device: cuda}", "ring.size", "needs 5 CPUs and 5 GPUs"),
        ("{size: 2, device: cuda, placement: strict-pack}", "ring.size",
         "on one node, the cluster can offer rings of up to 1"),
        ("{size: 2, device: cpu, threads: 2}", "ring.size", "the cluster can offer no such rank"),
    ],
)  # fmt: skip
def test_a_growing_cluster_refuses_what_it_can_never_hold(
    ring: str, field: str | None, says: str
) -> None:
    cluster, asked = growing()
    reason = cluster.refusal(config(ring))
    assert (reason.field if reason else None) == field
    assert says in str(reason)
    assert len(asked) == 1


def test_what_a_cluster_can_have_decides_about_devices_and_spare_ranks() -> None:
    def never() -> Capacity:
        raise AssertionError("asked")

    small = config("{size: 2, device: cpu}")
    growing_cluster, _ = growing()
    assert growing_cluster.device("auto") == "cuda"
    assert growing_cluster.needs_exact_size(small)
    still = Cluster(False, Capacity((NodeGroup("node", {"CPU": 8.0}),)))
    assert still.device("auto") == "cpu"
    assert not still.needs_exact_size(small)
    full = Cluster(False, Capacity((NodeGroup("node", GPU, 4),)), never)
    assert full.refusal(config("{size: 4}")) is None
    unknown = Cluster(False, EMPTY, lambda: None)
    assert unknown.refusal(config("{size: 64, device: cpu}")) is None
    without = Cluster(False, EMPTY, lambda: Capacity((NodeGroup("cpu", {"CPU": 8.0}, 4),)))
    reason = without.refusal(config("{size: 2, device: cuda}"))
    assert reason.field == "ring.device"
    assert "cuda needs GPUs, the cluster can offer none: 4 × cpu (8 CPU)" in reason.text


def test_without_a_limit_any_ring_fits() -> None:
    endless = Capacity((NodeGroup("gpu", GPU, math.inf),))
    assert endless.ranks(GPU) == math.inf
    assert endless.ranks(GPU, "STRICT_PACK") == 1
    assert endless.ranks({"CPU": 2.0}) == 0
    assert Capacity((NodeGroup("a", {"CPU": 0.3}),)).ranks({"CPU": 0.1}) == 3
    assert Capacity((NodeGroup("gpu", GPU, math.inf),), 3).ranks(GPU) == 3


# Machines of several rings

CPU_RANK = Placement("cpu", "PACK", (("CPU", 1.0),))
GPU_RANK = Placement("cuda", "PACK", tuple(GPU.items()))


def hold(machines: Machines, name: str, placement: Placement, *nodes: str) -> list[str]:
    """Places a ring and returns the nodes that it had to avoid."""
    avoid = machines.closed(placement)
    assert machines.take(name, placement, nodes)
    return sorted(avoid)


def test_cpu_rings_share_no_machine() -> None:
    machines = Machines(
        lambda: [node(name, address=host, CPU=4) for name, host in ("aa", "bb", "cb")]
    )
    assert machines.placement(CPU_RANK, 2) == CPU_RANK
    assert hold(machines, "one", CPU_RANK, "b", "b") == []
    assert hold(machines, "two", CPU_RANK, "a") == ["b", "c"], "one machine has two nodes"
    assert not machines.take("three", CPU_RANK, ["b"])
    assert not machines.holds("three")
    assert not machines.fits(CPU_RANK, 1)
    assert machines.fits(CPU_RANK, 8, but=["one"])
    assert not machines.fits(CPU_RANK, 8, avoid=["c"], but=["one"])
    machines.release("two")
    assert machines.fits(CPU_RANK, 4)
    assert not machines.fits(CPU_RANK, 5)


def test_gpu_rings_share_a_machine_while_they_lie_within_it() -> None:
    machines = Machines(lambda: [node("a", CPU=16, GPU=8), node("b", CPU=16, GPU=8)])
    small, large = (machines.placement(GPU_RANK, size) for size in (2, 12))
    assert (small.strategy, large.strategy) == ("STRICT_PACK", "PACK")
    assert hold(machines, "one", small, "a", "a") == []
    assert hold(machines, "two", small, "a", "a") == []
    assert machines.fits(small, 8), "on the other"
    assert not machines.fits(large, 12), "it would share the network of the first"
    assert hold(machines, "three", small, *"aaaa") == []
    assert hold(machines, "four", small, *"bbbbbb") == []
    assert machines.fits(small, 2)
    assert not machines.fits(small, 3)
    for name in ("one", "two", "three", "four"):
        machines.release(name)
    hold(machines, "wide", large, *"aaaaaaaabbbb")
    assert not machines.fits(small, 2), "its network is in use"
    assert Machines(lambda: [node("a", CPU=16, GPU=8)], shared=True).fits(small, 2)


@pytest.mark.parametrize(
    ("ring", "group", "most"),
    [
        ("size: 2, device: cpu", NodeGroup("n", {"CPU": 8.0}, 4), 4),
        ("size: 8, device: cpu", NodeGroup("n", {"CPU": 4.0}, 5), 2),
        ("size: 2, device: cpu, placement: strict-spread", NodeGroup("n", {"CPU": 4.0}, 5), 2),
        ("size: 2, device: cpu, placement: spread", NodeGroup("n", {"CPU": 4.0}, 5), 1),
        ("size: 2, device: cuda", NodeGroup("n", {"CPU": 8.0, "GPU": 8.0}, 3), 12),
        ("size: 16, device: cuda", NodeGroup("n", {"CPU": 8.0, "GPU": 8.0}, 5), 2),
        ("size: 4, device: cpu, placement: strict-pack", NodeGroup("n", {"CPU": 2.0}, 5), 0),
    ],
)
def test_how_many_rings_work_side_by_side(ring: str, group: NodeGroup, most: int) -> None:
    assert Cluster(False, Capacity((group,))).most_rings(config(f"{{{ring}}}")) == most
    assert Cluster(True, Capacity((group,))).most_rings(config(f"{{{ring}}}")) == 1


@pytest.mark.parametrize(("wanted", "rings"), [("null", 3), ("2", 2), ("3", 3), ("4", None)])
def test_the_number_of_rings_is_the_specs_if_so_many_fit(
    wanted: str, rings: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build(f"{{size: 2, concurrent: {wanted}}}", "[64, 128, 256, 512]")
    cluster = Cluster(False, Capacity((NodeGroup("n", {"CPU": 2.0}, 3),)))
    monkeypatch.setattr(cluster, "_hosts", lambda: {"a", "b", "c"})
    if rings is None:
        with pytest.raises(SpecError, match=r"ring\.concurrent: got 4, expected at most 3"):
            cluster.side_by_side(plan)
        return
    assert cluster.side_by_side(plan) == rings
    monkeypatch.setattr(cluster, "_hosts", lambda: {"a"})
    if wanted == "null":
        assert cluster.side_by_side(plan) == 1, "three nodes on one machine"
