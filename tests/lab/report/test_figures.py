"""Figures of a sweep: the right numbers under the right names."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from ringray.lab.report.figures import (
    blocks,
    curves,
    data,
    lines,
    memory,
    pareto,
    speedup,
    style,
    throughput,
)
from tests.support.figure_rows import (
    row,
    strategies,
    tiles,
    timed,
    trainings,
)


def layers(chart: Any) -> list[dict[str, Any]]:
    """The layers of the first panel of a chart."""
    found: list[dict[str, Any]] = chart.to_dict()["concat"][0]["layer"]
    return found


def records(chart: Any, panel: int = 0) -> list[dict[str, Any]]:
    """Returns the records that a panel of a chart draws."""
    found = chart.to_dict()
    rows: list[dict[str, Any]] = found["concat"][panel].get("data", found.get("data"))["values"]
    return rows


def test_lines_have_a_point_per_length_and_the_best_comes_first() -> None:
    rows = [
        row(i, timed(ms, mib), seq_len=length, partition=partition)
        for i, (length, partition, ms, mib) in enumerate(
            [
                (8192, "zigzag", 20.0, 80.0),
                (2048, "zigzag", 5.0, 20.0),
                (2048, "striped", 4.0, 30.0),
                (8192, "striped", 40.0, 70.0),
            ]
        )
    ]
    (panel,), _ = lines.varying_lengths(data.points(rows), "tflops")
    found = lines.lines(panel, ["partition"], "tflops")

    assert [(record["strategy"], record["length"], record["value"]) for record in found] == [
        ("zigzag", 2048, 0.4),
        ("zigzag", 8192, 0.1),
        ("striped", 2048, 0.5),
        ("striped", 8192, 0.05),
    ]
    for record in found:  # p20 and p80 are 1% beside the median
        assert record["low"] == pytest.approx(record["value"] / 1.01)
        assert record["high"] == pytest.approx(record["value"] / 0.99)
    least = lines.lines(panel, ["partition"], "median_ms")
    assert [record["strategy"] for record in least] == ["zigzag", "zigzag", "striped", "striped"]
    # The baseline did the same work in 100 ms, beside each of them.
    beside = throughput.baseline(panel)
    assert {record["strategy"] for record in beside} == {"SDPA with 2 threads"}
    assert [record["length"] for record in beside] == [2048, 8192]
    assert [record["value"] for record in beside] == pytest.approx([0.02, 0.02])


def test_throughput_and_memory_have_their_units() -> None:
    shown = data.points(strategies())
    small = throughput.draw(shown)
    spread, _, marks = layers(small)
    assert spread["encoding"]["y2"]["field"] == "high"
    assert marks["encoding"]["y"]["title"] == "GFLOP/s, all ranks"
    assert marks["encoding"]["y"]["scale"] == {"zero": True}
    assert marks["encoding"]["x"]["title"] == "sequence length (tokens)"
    assert marks["encoding"]["x"]["axis"]["values"] == [2048, 8192]
    assert {record["tokens"] for record in records(small)} == {"2k", "8k"}
    for record in records(small):
        assert record["low"] < record["value"] < record["high"] or record["strategy"].startswith(
            "SDPA"
        )
    large = [row(i, timed(0.01, 9000.0), seq_len=1024 << i) for i in range(3)]
    fast, wide = throughput.draw(data.points(large)), memory.draw(data.points(large))
    assert layers(fast)[-1]["encoding"]["y"]["title"] == "TFLOP/s, all ranks"
    assert layers(wide)[-1]["encoding"]["y"]["title"] == "peak memory per rank (GiB)"
    assert records(wide)[0]["value"] == pytest.approx(9000 / 1024)
    assert records(wide)[0]["low"] == records(wide)[0]["high"], "times say nothing of memory"


def test_speed_up_is_one_over_the_ratio() -> None:
    rows = [
        row(i, timed(ms), partition=partition, transport=transport)
        for i, (partition, transport, ms) in enumerate(
            [("zigzag", "ring", 80.0), ("striped", "ring", 125.0), ("zigzag", "ulysses", 50.0)]
        )
    ]
    points = data.points(rows)
    (panel,), _ = data.panels(points, beside=("seq_len",))
    found = speedup.bars(panel, data.strategies(points))
    assert found.names == ["zigzag ulysses", "zigzag ring", "striped ring"]
    assert [found.values[name, 1024] for name in found.names] == pytest.approx([2.0, 1.25, 0.8])
    drawn = speedup.draw(points)
    assert drawn.to_dict()["title"]["text"] == "Speed-up over SDPA with 2 threads"
    assert [record["value"] for record in records(drawn)] == pytest.approx([1.25, 0.8, 2.0])
    assert layers(drawn)[0]["encoding"]["y"]["sort"] == found.names
    alone = [row(i, timed(5.0 + i, baseline=None), partition=p) for i, p in enumerate("ab")]
    assert speedup.draw(data.points(alone)) is None


def test_the_front_is_what_nothing_beats() -> None:
    places = [(10, 50), (20, 30), (20, 40), (30, 30), (40, 10), (50, 11), (10, 60)]
    rows = [row(i, timed(ms, mib), transport=f"t{i}") for i, (ms, mib) in enumerate(places)]
    drawn = pareto.draw(data.points(rows))
    front = [record for record in records(drawn) if record["of"] == "Pareto front"]
    assert {record["strategy"] for record in front if "align" in record} == {"t0", "t1", "t4"}
    assert len(front) == 3
    same = [row(i, timed(5.0 + i), partition=p) for i, p in enumerate("ab")]
    assert pareto.draw(data.points(same)) is None, "memory does not vary"


def test_tiles_are_query_rows_by_key_rows_of_each_kernel() -> None:
    found, left_out = blocks.maps(data.points(tiles()))
    assert [record.title for record in found] == ["forward", "dkv"]
    assert left_out == 0
    forward = found[0]
    assert (forward.x, forward.y, forward.default_ms) == ("key rows", "query rows", 6.0)
    assert set(forward.cells) == {(n, m) for n in (32, 64, 128) for m in (64, 128)}
    # Trials 0 and 1 are 64x32 with 4 and 8 warps, of 5 and 10 ms.
    assert forward.cells[32, 64] == blocks.Cell(5.0, "4/2")


def test_ids_of_a_figure_are_its_own_in_a_page() -> None:
    drawn = blocks.draw(data.points(tiles()))
    svg = style.picture(drawn, "its").svg
    ids = set(re.findall(r'\bid="([^"]+)"', svg))
    assert ids
    assert all(record.startswith("its-") for record in ids), (
        "those of Vega in the page have no name"
    )
    assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= ids


def test_curves_are_thinned_and_end_where_the_training_ended() -> None:
    (point, best) = data.points(trainings())
    assert curves.curve(point, "loss") == [(1, 4.0), (2, 3.0), (3, 1.5)]
    long = replace(point, samples={"loss": [float(at) for at in range(6000)]})
    thin = curves.curve(long, "loss")
    assert len(thin) == 150
    assert thin[-1] == (6000, 5999.0)
    drawn = curves.draw([point, best])
    names = [record["strategy"] for record in records(drawn)]
    assert list(dict.fromkeys(names)) == ["1024", "512"], "the least loss first"
