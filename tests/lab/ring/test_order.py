"""The order of ranks along a ring."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ringray.lab.plan.plan import build
from ringray.lab.predict.hardware import parse_fleet
from ringray.lab.ring.order import ZONES, RankLocation, crossings, divided, ordered, zones_of
from ringray.lab.specs.model import parse


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


def test_gpus_of_a_node_follow_each_other() -> None:
    gpus = [RankLocation("n", gpu=number) for number in "2031"]
    assert ordered(gpus, 4) == [1, 3, 0, 2]
