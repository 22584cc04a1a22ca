"""The order of ranks along a ring; the survey of links: who meets whom, and by which device."""

from __future__ import annotations

import itertools
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.plan.plan import build
from ringray.lab.predict.hardware import parse_fleet
from ringray.lab.ring import links
from ringray.lab.ring.links import rounds
from ringray.lab.ring.order import (
    ZONES,
    RankLocation,
    check,
    crossings,
    divided,
    gpu_links,
    ordered,
    zones_of,
)
from ringray.lab.specs.model import parse
from tests.chaos.struck import NODE
from tests.support import ray_heads
from tests.support.place import Place, tiny


def locations(*counts: int, **zones: str) -> list[RankLocation]:
    """Seats on nodes 0, 1, ... in a random order, as a placement group may deal them."""
    found = [
        RankLocation(str(node), zones_of({ZONES[2]: zones.get(f"n{node}", "")}))
        for node, count in enumerate(counts)
        for _ in range(count)
    ]
    return random.Random(1).sample(found, len(found))


def nodes(found: list[RankLocation], size: int, *how: Any) -> list[str]:
    along = ordered(found, size, *how)
    assert sorted(along) == list(range(len(found)))
    return [found[at].node for at in along[:size]]


@pytest.mark.parametrize("counts", [(4, 4), (1, 1, 1, 1), (3, 5, 2), (8,)])
def test_a_ring_crosses_each_boundary_once_per_direction(counts: tuple[int, ...]) -> None:
    made, size = locations(*counts), sum(counts)
    several = len(counts) * (len(counts) > 1)
    assert crossings(nodes(made, size)) == several
    if 1 < len(counts) < size:
        assert crossings([location.node for location in made]) > several  # as they are given
    mixed = nodes(made, size, "shuffled", 1, 7)
    assert sorted(mixed) == sorted(nodes(made, size))
    assert mixed == nodes(made, size, "shuffled", 1, 7)
    assert nodes(made, size, "given") == [location.node for location in made]


def test_a_smaller_ring_takes_the_fewest_nodes() -> None:
    assert set(nodes(locations(2, 4, 3), 4)) == {"1"}
    assert set(nodes(locations(2, 4, 3), 4, "shuffled")) == {"1"}


def test_nodes_of_a_rack_follow_each_other() -> None:
    made = locations(2, 2, 2, 2, n0="b", n1="a", n2="b", n3="a")
    assert nodes(made, 8)[::2] in (["1", "3", "0", "2"], ["3", "1", "0", "2"],
                                   ["1", "3", "2", "0"], ["3", "1", "2", "0"])  # fmt: skip


def test_inner_groups_lie_on_one_node_where_they_can() -> None:
    made = locations(5, 3, 4)
    assert divided(nodes(made, 12), 4) > 1
    assert divided(nodes(made, 12, "topology", 4), 4) == 1  # of 1 + 3 that are left
    assert divided(nodes(locations(8, 4), 12, "topology", 4), 4) == 0
    assert divided(["a", "a", "b"], 1) == 0


@pytest.mark.parametrize(
    ("transport", "inner"), [("double-ring:4", 4), ("hybrid:2", 2), ("ring", 1), ("auto", 1)]
)
def test_inner_groups_of_a_trial(transport: str, inner: int) -> None:
    text = "version: 1\nname: a\nkind: latency\nring: {size: 8}\nproblem: {seq_len: 1k}\n"
    text += f"strategy: {{transport: {transport}}}\n"
    (trial,) = build(parse(text), parse_fleet("h100:8")).trials
    assert trial.config.inner == inner


def test_neighbours_share_the_closest_links() -> None:
    # Pairs 0-2 and 1-3 are bridged, all others meet at the host.
    near = {(0, 2): 100, (2, 0): 100, (1, 3): 100, (3, 1): 100, (2, 1): -20, (1, 2): -20}
    gpus = [
        RankLocation(
            "n", gpu=str(a), links={str(b): near.get((a, b), -50) for b in range(4) if a != b}
        )
        for a in range(4)
    ]
    assert ordered(gpus, 4) == [0, 2, 1, 3]
    assert ordered([RankLocation("n", gpu=str(a)) for a in range(4)], 4) == [0, 1, 2, 3]


def test_labels_that_contradict_are_told() -> None:
    def at(node: str, **labels: str) -> RankLocation:
        full = {"rack": ZONES[2], "domain": ZONES[3], "zone": ZONES[1], "region": ZONES[0]}
        return RankLocation(node, zones_of({full[name]: value for name, value in labels.items()}))

    check([at("a", rack="r1", zone="z1"), at("b", rack="r1", zone="z2"), at("c"), at("d")])
    with pytest.raises(
        PlaceError, match=r"ringray.io/domain 'd1' is in ringray.io/rack 'r1'.*'r2'"
    ):
        check([at("a", rack="r1", domain="d1"), at("b", rack="r2", domain="d1")])
    with pytest.raises(PlaceError, match=r"zone 'z' is in ray\.io/availability-region"):
        check([at("a", region="east", zone="z"), at("b", region="west", zone="z")])


@pytest.mark.exhaustive
def test_ranks_follow_the_nodes_of_a_real_cluster(place: Place) -> None:
    """Ray gives a bundle to the emptier node, and of two alike to either: of six ranks as they are
    given, each pair lies on both, so their ring crosses four times or more."""
    text = tiny("order", size=6, repeats=2)
    text = text.replace("threads: 1", "threads: 1, placement: spread, order: [given, topology]")
    with ray_heads.cluster(place, NODE, NODE) as head:
        done = place.run("run", place.spec(text), "--no-tracking", "--address", head.address)
        assert done.code == 0, done.out + done.err
        groups = head.ask("/api/v0/placement_groups?detail=True")["data"]["result"]["result"]
    (dealt,) = ([bundle["node_id"] for bundle in group["bundles"]] for group in groups)
    given, topology = (row.environment["ring"] for row in place.trials("order"))
    assert given == {"nodes": 2, "crossings": crossings(dealt)}
    assert topology == {"nodes": 2, "crossings": 2}


def test_links_are_those_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_links("GPU-1") == {}  # no such GPU, or no NVML
    levels = {frozenset("01"): 10, frozenset("02"): 50, frozenset("12"): 50}
    nvml = SimpleNamespace(
        NVMLError=LookupError, NVML_P2P_CAPS_INDEX_NVLINK=2, NVML_P2P_STATUS_OK=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3, nvmlDeviceGetHandleByIndex=str,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid[-1],
        nvmlDeviceGetUUID=lambda at: f"GPU-{at}",
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: levels.get(frozenset(a + b), 0),
        nvmlDeviceGetP2PStatus=lambda a, b, _: 0 if {a, b} == {"0", "2"} else 5,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_links("GPU-0") == {"GPU-1": -10, "GPU-2": 50}


# Links


@pytest.mark.parametrize("count", [2, 3, 4, 17])
def test_each_pair_meets_once_and_no_node_twice_in_a_round(count: int) -> None:
    met = list(rounds(count))
    assert sorted(itertools.chain(*met)) == list(itertools.combinations(range(count), 2))
    assert len(met) == count - 1 + count % 2, "as few rounds as there can be"
    for pairs in met:
        ends = list(itertools.chain(*pairs))
        assert len(set(ends)) == len(ends)


def node(name: str, address: str, **resources: float) -> dict[str, Any]:
    fields = {"NodeID": name * 56, "Alive": True, "Resources": resources}
    return {**fields, "NodeManagerAddress": address}


@pytest.mark.parametrize("there", [[], [node("a", "h", CPU=1), node("b", "h", memory=9)]])
def test_one_node_has_no_links(
    there: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links.ray, "nodes", lambda: there)
    with pytest.raises(PlaceError, match=r"has [01] nodes? with CPUs or GPUs, expected at least 2"):
        links.measure(lambda _: None)


def test_a_link_is_that_of_the_slower_end() -> None:
    mine, other = [(1000, 1e-3), (1_001_000, 2e-2)], [(1000, 2e-3), (1_001_000, 1.2e-1)]
    link = links._link((0, 1), "cpu", [mine, other])
    assert link.latency == pytest.approx(2e-3)
    assert link.bandwidth == pytest.approx(1_001_000 / 0.118)
    failed = links._link((0, 1), "cpu", [mine, "RuntimeError: timed out"])
    assert failed.error == "no messages pass: RuntimeError: timed out"
