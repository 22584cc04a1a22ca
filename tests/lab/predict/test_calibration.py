"""Calibrations of machines and links: where they are kept, and where predictions take them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ringray.base import provenance
from ringray.base.errors import UserError
from ringray.lab import cli
from ringray.lab.plan import plan
from ringray.lab.predict import calibration
from ringray.lab.predict.hardware import table
from ringray.lab.predict.links import ClusterLinks, LinkedNode, NodePair
from ringray.lab.specs import model as spec

SPEC = "version: 1\nname: x\nkind: latency\nring: {size: 8, device: cpu}\nproblem: {seq_len: 4k}\n"


@pytest.fixture
def fields(home: Path) -> dict[str, Any]:
    """An entry of an own kind, and an empty home."""
    found = table()["cpu"].model_dump(mode="json", exclude_none=True)
    return found | {"cores": 2, "op": 1.0, "measured": "2026-01-01T00:00:00+00:00"}


def test_an_entry_is_read_as_it_was_written(fields: dict[str, Any], home: Path) -> None:
    place = calibration.write(fields, "cpu")
    found, where = calibration.find("cpu")
    assert (found.op, found.cores, where) == (1.0, 2, str(place))
    assert found.versions["torch"] == provenance.versions()["torch"]
    assert place.parent == home / "hardware"
    assert place.stat().st_mode & 0o077 == 0
    assert calibration.find("cuda")[0] is None


def test_plans_for_this_machine_take_it(fields: dict[str, Any]) -> None:
    calibration.write(fields, "cpu")
    on = calibration.fleet("local")
    assert on.ranks >= 8, "ranks that share cores are as many as one likes"
    for built in (plan.build(spec.parse(SPEC)), plan.build(spec.parse(SPEC), on)):
        (trial,) = built.runnable
        assert trial.predicted.time_ms > 1000, "the op alone takes a second"


@pytest.mark.parametrize("changed", ["torch", "kernels", "cpu"])
def test_one_of_another_version_is_not_used(
    fields: dict[str, Any], changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration.write(fields, "cpu")
    now = calibration.versions("cpu") | {changed: "new"}
    monkeypatch.setattr(calibration, "versions", lambda device: now)
    before = table()["cpu"].op
    assert plan.local_fleet("cpu").hardware.op == before
    with pytest.raises(UserError, match=rf"{changed} .*, now new; run `ringray calibrate` again"):
        calibration.fleet("local:4")


def test_a_damaged_file_is_named(fields: dict[str, Any]) -> None:
    place = calibration.write(fields, "cpu")
    place.write_text(json.dumps({"local": {"title": 1}}))
    with pytest.raises(UserError, match=f"{place.name}: local.title: got 1"):
        calibration.find("cpu")


# Links

FAST = 1.2e9
RING = (
    "version: 1\nname: x\nkind: latency\nring: {size: 4}\n"
    "problem: {seq_len: 64k, heads: 8, head_dim: 128, dtype: bfloat16}\n"
)


def cluster(
    count: int, slow: dict[tuple[int, int], dict[str, Any]] | None = None, **changes: Any
) -> ClusterLinks:
    """Nodes with one H100 each; ``slow``: what is different about a pair."""
    environment = provenance.describe()
    environment["hardware"] = {**environment["hardware"], "gpus": ["NVIDIA H100 80GB HBM3"]}
    usual = {"device": "cuda", "bandwidth": FAST, "latency": 1e-4}
    return ClusterLinks(
        **{
            "measured": "2026-11-01T10:00:00+00:00",
            "nodes": [
                LinkedNode(name=f"10.0.0.{number + 2}", environment=environment)
                for number in range(count)
            ],
            "pairs": [
                NodePair.model_validate({"nodes": pair, **usual, **(slow or {}).get(pair, {})})
                for pair in itertools.combinations(range(count), 2)
            ],
        }
        | changes
    )


def of_node(at: int, count: int, **different: Any) -> dict[tuple[int, int], dict[str, Any]]:
    return {pair: different for pair in itertools.combinations(range(count), 2) if at in pair}


def test_a_slow_pair_is_named_with_the_median() -> None:
    (line,) = cluster(4, {(1, 3): {"bandwidth": 95e6}}).outliers()
    assert line == "10.0.0.3 ↔ 10.0.0.5: 95.0 MB/s, the median is 1.20 GB/s"
    cut_off = {(0, 3): {"error": "x"}, (2, 3): {"error": "x"}}  # the pair says nothing of its node
    assert list(cluster(4, cut_off | {(1, 3): {"bandwidth": 95e6}}).outliers()) == [line]
    (line,) = cluster(4, {(1, 3): {"latency": 6e-3}}).outliers()
    assert line == "10.0.0.3 ↔ 10.0.0.5: 6.00 ms latency, the median is 100 µs latency"


@pytest.mark.parametrize("count", [3, 4, 9])
def test_a_slow_node_is_named_in_place_of_its_pairs(count: int) -> None:
    (line,) = cluster(count, of_node(1, count, bandwidth=95e6)).outliers()
    assert line == "10.0.0.3 is slow to all others: 95.0 MB/s, the median is 1.20 GB/s"
    (line,) = cluster(count, of_node(2, count, latency=2e-3)).outliers()
    assert line.startswith("10.0.0.4 is far from all others: 2.00 ms latency")


def test_a_lost_node_is_one_problem_and_a_cut_link_another() -> None:
    links = cluster(4, of_node(3, 4, error="x") | {(0, 1): {"error": "no messages pass"}})
    nodes = (*links.nodes[:3], links.nodes[3].model_copy(update={"lost": "the node is gone"}))
    assert list(links.model_copy(update={"nodes": nodes}).problems()) == [
        "10.0.0.5: the node is gone", "10.0.0.2 ↔ 10.0.0.3: no messages pass",
    ]  # fmt: skip


def predicted_ms(on: str) -> float:
    built = plan.build(spec.parse(RING), calibration.fleet(on))
    (trial,) = built.runnable
    return trial.predicted.time_ms


def test_measured_links_change_the_prediction(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, alone = predicted_ms("h100:4x1"), predicted_ms("h100:4")
    place = calibration.write_links(cluster(4))
    assert place.parent == home / "hardware"
    assert place.stat().st_mode & 0o077 == 0
    assert predicted_ms("h100:4x1") > 2 * before, "its network is 50 GB/s by the table"
    assert predicted_ms("h100:4") == alone, "one node has no network"
    slow = cluster(4, {(0, 1): {"bandwidth": FAST / 20}})
    usual = predicted_ms("h100:4x1")
    assert calibration.write_links(slow) == place, "it replaces those of the same cluster"
    assert predicted_ms("h100:4x1") == usual, "a ring may go around one pair"
    calibration.write_links(cluster(4, of_node(0, 4, bandwidth=FAST / 20)))
    assert predicted_ms("h100:4x1") > 5 * usual, "a ring visits all nodes"
    (path := tmp_path / "x.yaml").write_text(RING)
    assert cli.main(["plan", str(path), "--on", "h100:4x1"]) == 0
    line = "measured 2026-11-01T10:00:00+00:00 on 4 nodes: 60.0 MB/s, 100 µs latency"
    assert f"\nlinks between nodes {line}\n" in capsys.readouterr().out
    assert cli.main(["plan", str(path), "--on", "h100:4"]) == 0
    assert "links" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "found",
    [
        cluster(3),  # fewer nodes
        cluster(4, {pair: {"device": "cpu"} for pair in itertools.combinations(range(4), 2)}),
        cluster(4, {pair: {"error": "x"} for pair in itertools.combinations(range(4), 2)}),
        cluster(4, nodes=[LinkedNode(name=x, environment={"hardware": {}}) for x in "abcd"]),
        cluster(4, nodes=[*cluster(3).nodes, LinkedNode(name="d", lost="gone")]),
    ],
)
def test_links_of_another_cluster_change_nothing(home: Path, found: ClusterLinks) -> None:
    before = predicted_ms("h100:4x1")
    calibration.write_links(found)
    assert predicted_ms("h100:4x1") == before
