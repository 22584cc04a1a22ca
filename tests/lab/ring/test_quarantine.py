"""Nodes on which rings fail."""

from __future__ import annotations

from dataclasses import replace

from ringray.lab.ring.quarantine import Quarantine
from ringray.lab.trial.faults import Fault


def of(kind: str, node_id: str = "") -> Fault:
    return Fault(kind, ranks=(0,), node_id=node_id)  # type: ignore[arg-type]


def test_nodes_on_which_rings_fail() -> None:
    nodes = Quarantine()
    died = of("rank-died", node_id="a")
    assert not nodes.failed(died)
    assert not nodes.failed(of("rank-died", node_id="b"))
    assert not nodes.failed(of("compile-error", node_id="a"))
    nodes.succeeded(["a", "b"])
    assert nodes.failed(died), "one good trial clears nothing"
    assert nodes.failed(replace(died, kind="stalled")), "while it could not be set aside"
    nodes.add("a")
    assert nodes.nodes == ("a",)
    assert not nodes.failed(died), "it is said once"
    for _ in range(Quarantine.CLEARS):
        nodes.succeeded(["b"])
    assert not nodes.failed(of("stalled", node_id="b"))
    assert nodes.failed(of("node-lost", node_id="c")), "at once"
    assert not nodes.failed(of("rank-died")), "nobody knows where"
