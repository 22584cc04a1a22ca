"""The survey of a cluster's links: who meets whom, and by which device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from ringray.base.errors import PlaceError
from ringray.lab.ring import links
from ringray.lab.ring.links import rounds


@pytest.mark.parametrize("count", [2, 3, 4, 17])
def test_each_pair_meets_once_and_no_node_twice_in_a_round(count: int) -> None:
    found = list(rounds(count))
    assert sorted(itertools.chain(*found)) == list(itertools.combinations(range(count), 2))
    assert len(found) == count - 1 + count % 2, "as few rounds as there can be"
    for pairs in found:
        ends = list(itertools.chain(*pairs))
        assert len(set(ends)) == len(ends)


def node(name: str, address: str, **resources: float) -> dict[str, Any]:
    there = {"NodeID": name * 56, "Alive": True, "Resources": resources}
    return {**there, "NodeManagerAddress": address}


@pytest.mark.parametrize("nodes", [[], [node("a", "h", CPU=1), node("b", "h", memory=9)]])
def test_one_node_has_no_links(
    nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links.ray, "nodes", lambda: nodes)
    with pytest.raises(PlaceError, match=r"has [01] nodes? with CPUs or GPUs, expected at least 2"):
        links.measure(lambda _: None)


def test_a_link_is_that_of_the_slower_end() -> None:
    mine, other = [(1000, 1e-3), (1_001_000, 2e-2)], [(1000, 2e-3), (1_001_000, 1.2e-1)]
    found = links._link((0, 1), "cpu", [mine, other])
    assert found.latency == pytest.approx(2e-3)
    assert found.bandwidth == pytest.approx(1_001_000 / 0.118)
    failed = links._link((0, 1), "cpu", [mine, "RuntimeError: timed out"])
    assert failed.error == "no messages pass: RuntimeError: timed out"
