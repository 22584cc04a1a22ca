"""Which machines the rings of a run hold, and which they may share."""

from __future__ import annotations

from typing import Any

import pytest

from ringray.base.errors import SpecError
from ringray.lab.cluster.capacity import Capacity, NodeGroup, Placement
from ringray.lab.cluster.fit import Cluster
from ringray.lab.cluster.machines import Machines
from ringray.lab.plan.plan import build
from ringray.lab.specs.model import parse

CPU = Placement("cpu", "PACK", (("CPU", 1.0),))
GPU = Placement("cuda", "PACK", (("CPU", 1.0), ("GPU", 1.0)))


def node(name: str, cpus: int = 4, gpus: int = 0, address: str = "") -> dict[str, Any]:
    has = {"CPU": float(cpus), "GPU": float(gpus)}
    return {"NodeID": name, "NodeManagerAddress": address or name, "Alive": True, "Resources": has}


def hold(machines: Machines, name: str, placement: Placement, *nodes: str) -> list[str]:
    """Places a ring and returns the nodes that it had to avoid."""
    avoid = machines.closed(placement)
    assert machines.take(name, placement, nodes)
    return sorted(avoid)


def test_cpu_rings_share_no_machine() -> None:
    machines = Machines(lambda: [node("a"), node("b"), node("c", address="b")])
    assert machines.placement(CPU, 2) == CPU
    assert hold(machines, "one", CPU, "b", "b") == []
    assert hold(machines, "two", CPU, "a") == ["b", "c"], "one machine has two nodes"
    assert not machines.fits(CPU, 1)
    assert machines.fits(CPU, 8, but=["one"])
    assert not machines.fits(CPU, 8, avoid=["c"], but=["one"])
    machines.release("two")
    assert machines.fits(CPU, 4)
    assert not machines.fits(CPU, 5)


def test_gpu_rings_share_a_machine_while_they_lie_within_it() -> None:
    machines = Machines(lambda: [node("a", 16, 8), node("b", 16, 8)])
    small, large = (machines.placement(GPU, size) for size in (2, 12))
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
    assert Machines(lambda: [node("a", 16, 8)], shared=True).fits(small, 2)


def test_of_two_rings_that_are_placed_at_a_time_one_moves() -> None:
    machines = Machines(lambda: [node("a"), node("b")])
    hold(machines, "one", CPU, "a")
    assert not machines.take("two", CPU, ["b", "a"])
    assert not machines.holds("two")
    assert machines.take("two", CPU, ["b"])
    assert machines.closed(CPU) == {"a", "b"}


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
    text = f"version: 1\nname: a\nkind: latency\nring: {{{ring}}}\nproblem: {{seq_len: 64}}\n"
    (trial,) = build(parse(text)).trials
    assert Cluster(False, Capacity((group,))).most_rings(trial.config) == most
    assert Cluster(True, Capacity((group,))).most_rings(trial.config) == 1


@pytest.mark.parametrize(("wanted", "rings"), [("null", 3), ("2", 2), ("3", 3), ("4", None)])
def test_the_number_of_rings_is_the_specs_if_so_many_fit(
    wanted: str, rings: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"version: 1\nname: a\nkind: latency\nring: {{size: 2, concurrent: {wanted}}}\n"
    plan = build(parse(text + "problem: {seq_len: [64, 128, 256, 512]}\n"))
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
