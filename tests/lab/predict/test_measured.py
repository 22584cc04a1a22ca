"""Measured tables: times between their rows, heads, shapes and sizes, and entries that use them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringray.base.errors import UserError
from ringray.lab.predict import (
    collectives,
    cost_model,
    hardware,
    measured,
    products,
    rates,
    transformer,
)
from ringray.lab.predict.collectives import Operation
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Direction, Hardware, Link
from ringray.lab.predict.measured import calls
from ringray.lab.predict.measured.calls import WINDOW, Calls
from ringray.lab.predict.rank_memory import Training
from ringray.lab.trial.config import TrialConfig
from ringray.models.sizes import named
from ringray.training.recipe import Degrees
from tests.support.point import point

TABLED = ("a100", "h100", "h200", "b200", "b300", "gb200", "gb300", "l40s", "rtx-pro-6000")


def seconds(
    on: Hardware, rows: int, heads: int, kv_heads: int, window: int | None = None, **dims: Any
) -> float:
    """Seconds of a causal forward call, with all keys up to a query or the last of them."""
    dim, value = dims.get("head_dim", 128), dims.get("value_dim")
    keys = min(rows, window or rows)
    pairs = np.full(1, rows * keys - keys * (keys - 1) / 2)
    curves = rates.find(
        on, "bfloat16", dim, "forward", heads=heads, kv_heads=kv_heads, value_dim=value
    )
    flops = 2.0 * (dim + (value or dim)) * heads * pairs
    return float(curves.seconds(flops, np.full(1, rows), np.full(1, rows), pairs)[0])


@pytest.mark.parametrize("name", TABLED)
def test_a_measured_call_takes_what_was_measured(name: str) -> None:
    on = hardware.table()[name]
    assert on.tables
    table = measured.read(on.tables)["causal"]
    for (dim, window, heads, kv_heads), times in [*table.seconds.items()][::7]:
        if kv_heads in (1, 2, 4, 8, heads):
            rows = int(table.at[4])
            time = seconds(on, rows, heads, kv_heads, window or None, head_dim=dim)
            assert time == pytest.approx(times[4], rel=0.02)


def test_a_call_of_mla_takes_what_was_measured() -> None:
    on = hardware.table()["b200"]
    times = measured.read("b200_sxm")["mla"].seconds[192, 0, 16, 16]
    time = seconds(on, 2048, 16, 16, head_dim=192, value_dim=128)
    assert time == pytest.approx(times[3], rel=0.01)
    assert seconds(on, 2048, 16, 16, head_dim=192) != pytest.approx(times[3], rel=0.01)


@pytest.mark.parametrize("left_out", [{"rows": (2048,)}, {"heads": (4, 32)}])
def test_calls_between_measured_ones_are_near(left_out: dict[str, tuple[int, ...]]) -> None:
    errors = []
    for system in ("h100_sxm", "b200_sxm"):
        nearest = calls.nearest(system, "causal", 128)
        assert nearest
        every = nearest[1]
        keeps = ~np.isin(every.rows, left_out.get("rows", ()))
        without = left_out.get("heads", ())
        rest = Calls(
            every.rows[keeps],
            {key: s[keeps] for key, s in every.seconds.items() if key[0] not in without},
        )
        for (heads, kv_heads), times in every.seconds.items():
            far = np.abs(rest.time(every.rows, heads, kv_heads) / times - 1)
            errors += far.tolist() if heads in without else far[~keeps].tolist()
    # With twice the distance between measured points that predictions have.
    assert np.median(errors) < 0.06
    assert np.quantile(errors, 0.9) < 0.18


def test_few_heads_leave_a_device_idle() -> None:
    on = hardware.table()["h100"]
    per_head = [seconds(on, 2048, heads, 1) / heads for heads in (1, 2, 8, 64)]
    assert all(few > 1.2 * several for few, several in pairwise(per_head))
    assert per_head[0] > 5 * per_head[-1]


def test_longer_calls_than_measured_fill_a_device_with_one_head() -> None:
    on = hardware.table()["h100"]
    assert seconds(on, 1 << 20, 1, 1) == pytest.approx(seconds(on, 1 << 20, 64, 1) / 64, rel=0.05)
    beyond = rates.find(on, "bfloat16", 128, "forward", heads=1, kv_heads=1)
    assert beyond.unknown(1 << 20) > beyond.unknown(16384) == 0


def test_keys_of_their_own_take_longer() -> None:
    on = hardware.table()["l40s"]
    shared, some, own = (seconds(on, 2048, 64, kv_heads) for kv_heads in (1, 16, 64))
    assert shared < some < own
    assert seconds(on, 2048, 64, 8) < some


def test_windows_lie_between_the_measured_one_and_none() -> None:
    on = hardware.table()["h100"]
    times = [seconds(on, 16384, 8, 8, window) for window in (WINDOW, 512, 2048, 8192, 16384)]
    assert all(narrow < wide for narrow, wide in pairwise(times))
    assert times[-1] == pytest.approx(seconds(on, 16384, 8, 8))


def test_a_full_call_has_the_chain_of_a_causal_one() -> None:
    on = hardware.table()["b200"]
    few, many = (
        rates.find(on, "bfloat16", 128, "forward", heads=heads, kv_heads=1) for heads in (1, 64)
    )
    assert few.full[0] / few.causal[0] > 1.9  # twice the pairs in the same time
    last = list(many.rows).index(16384)
    assert many.full[last] / many.causal[last] == pytest.approx(1.0, abs=0.1)


def test_curves_of_an_entry_with_tables_are_factors() -> None:
    on = hardware.table()["gb200"]
    slower = on.model_copy(
        update={
            "attention": tuple(
                one.model_copy(update={"rates": {n: r / 2 for n, r in one.rates.items()}})
                for one in on.attention
            )
        }
    )
    assert seconds(slower, 5000, 6, 2) == pytest.approx(2 * seconds(on, 5000, 6, 2))
    ways = [
        rates.find(on, "bfloat16", 128, way, heads=32, kv_heads=8).causal[28]
        for way in ("backward", "forward")
    ]
    assert ways[0] / ways[1] == pytest.approx(0.778)


def test_an_entry_without_tables_has_its_own_rates_whatever_the_heads() -> None:
    on = hardware.table()["mi300x"]
    assert seconds(on, 4096, 1, 1) == pytest.approx(seconds(on, 4096, 64, 8) / 64)
    own = hardware.table()["h100"].model_copy(update={"tables": None})
    assert rates.find(own, "bfloat16", 128, "forward", heads=1, kv_heads=1).causal[0] == 1.0


def test_products_between_measured_shapes() -> None:
    on = hardware.table()["h100"]
    measured_s = measured.read("h100_sxm")["product"].seconds[4096, 8192][2]
    assert products.seconds(on, "bfloat16", 2048, 8192, 4096) == pytest.approx(measured_s)
    between = products.seconds(on, "bfloat16", 3072, 8192, 4096)
    assert 1.3 < between / measured_s < 1.7
    assert products.seconds(on, "float32", 2048, 8192, 4096) > 10 * measured_s
    few = products.seconds(on, "bfloat16", 16, 1024, 1024)
    assert few > 16 / 512 * 2 * products.seconds(on, "bfloat16", 512, 1024, 1024)
    large = 2.0 * 131072 * 32768 * 32768 / products.seconds(on, "bfloat16", 131072, 32768, 32768)
    assert 0.6 * 989e12 < large < 989e12
    other = hardware.table()["mi300x"]
    assert products.seconds(other, "bfloat16", 8, 8, 8) == pytest.approx(
        1024 / (other.products * 1307e12)
    )


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce", "alltoall"])
def test_collectives_within_a_node(operation: Operation) -> None:
    on = hardware.parse_fleet("h100:8")
    table = measured.read("h100_sxm")[operation]
    sizes, times = 2 * table.at, table.seconds[8,]
    assert collectives.seconds(on, operation, 8, sizes[-3]) == pytest.approx(times[-3])
    middle = collectives.seconds(on, operation, 8, (sizes[-3] + sizes[-2]) / 2)
    assert middle == pytest.approx((times[-3] + times[-2]) / 2)
    last = collectives.seconds(on, operation, 8, 4 * sizes[-1])
    assert last == pytest.approx(4 * times[-1], rel=0.1)
    three = collectives.seconds(on, operation, 3, sizes[-2])
    two, four = (collectives.seconds(on, operation, ranks, sizes[-2]) for ranks in (2, 4))
    assert two < three < four
    assert collectives.seconds(on, operation, 1, 1e9) == 0.0


def test_collectives_of_more_ranks_than_measured_and_of_nodes() -> None:
    rack = hardware.parse_fleet("gb200:72")
    four, most = (collectives.seconds(rack, "all_gather", ranks, 1e9) for ranks in (4, 72))
    assert most == pytest.approx(four * (71 / 72) / (3 / 4))
    nodes = hardware.parse_fleet("h100:2x8")
    link = nodes.hardware.outer
    both = collectives.seconds(nodes, "alltoall", 16, 1e9)
    assert both == pytest.approx(5e8 / link.bandwidth + link.latency)
    # Each rank of a node brings a part of what the node lacks.
    assert collectives.seconds(nodes, "all_gather", 16, 1e9) < both / 2
    # Every other rank: half as many are on a node.
    apart = collectives.seconds(replace(nodes, stride=2), "all_gather", 8, 1e9)
    assert apart == pytest.approx(5e8 / 4 / link.bandwidth + link.latency)


def test_an_exchange_of_heads_takes_what_all_to_all_takes() -> None:
    config = point(
        ring_size=8, seq_len=65536, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16",
        transport="ulysses", device="cuda", direction="forward",
    )  # fmt: skip
    on = hardware.parse_fleet("h100:8")
    cost = cost_model.predict(config, on)
    whole = cost.sent_bytes / 8 / 2 * 8 / 7  # of a rank, there or back, with what it keeps
    exchanges = 2 * collectives.seconds(on, "alltoall", 8, whole)
    agreeing = 3 * on.hardware.inner.latency
    assert cost.exposed_ms == pytest.approx(1e3 * (exchanges + agreeing), rel=1e-6)
    by_link = replace(on, hardware=on.hardware.model_copy(update={"collectives": None}))
    assert cost_model.predict(config, by_link).exposed_ms < cost.exposed_ms  # 367 GB/s, not 315


def test_a_batch_counts_as_more_heads() -> None:
    fields: dict[str, Any] = {
        "seq_len": 4096, "head_dim": 128, "dtype": "bfloat16", "device": "cuda",
        "direction": "forward",
    }  # fmt: skip
    on = hardware.parse_fleet("l40s:1")
    batch, heads = point(batch=4, heads=16, **fields), point(batch=1, heads=64, **fields)
    shared = point(batch=4, heads=16, kv_heads=1, **fields)
    ways: tuple[Callable[[TrialConfig], float], ...] = (
        lambda config: cost_model.predict(config, on).time_ms,
        lambda config: 1e3 * cost_model.alone_s(config, on),
    )
    for time_ms in ways:
        assert time_ms(batch) == pytest.approx(time_ms(heads))
        assert time_ms(batch) > 1.1 * time_ms(shared)
        assert time_ms(batch) == pytest.approx(1e3 * seconds(on.hardware, 4096, 64, 64), rel=1e-3)
        few = point(batch=1, heads=1, **fields)
        assert time_ms(few) > 1.5 * time_ms(batch) / 64


def test_few_heads_on_a_rank_are_slow_in_a_plan() -> None:
    fields: dict[str, Any] = {
        "seq_len": 16384, "heads": 8, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16",
        "device": "cuda", "ring_size": 8,
    }  # fmt: skip
    on = hardware.parse_fleet("b200:8")
    ring, ulysses = (
        cost_model.predict(point(transport=transport, **fields), on)
        for transport in ("ring", "ulysses")
    )
    one_head = seconds(on.hardware, 16384, 1, 1)
    assert ulysses.time_ms - ulysses.exposed_ms >= 1e3 * one_head
    batch = cost_model.predict(point(transport="ulysses", **fields, batch=8), on)
    assert batch.time_ms < 6 * ulysses.time_ms  # 8 heads of 8 sequences fill the device
    assert ring.flops == ulysses.flops


def test_a_system_without_tables_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=re.escape("did you mean 'h100_sxm'?")):
        hardware.entry({**hardware.table()["h100"].model_dump(), "tables": "h100_smx"}, "mine.yaml")
    fields = hardware.table()["h100"].model_dump() | {"inner": Link(bandwidth=1e9, latency=0.0)}
    assert hardware.entry(fields, "mine.yaml").tables == "h100_sxm"


def test_the_table_of_hardware_has_the_figures_of_entries() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "hardware.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    by_name = {row[1].strip("`"): row for row in rows if len(row) == 10}
    for name in (*TABLED, "h800"):
        on = hardware.table()[name]
        figures = []
        asked: tuple[tuple[int, Direction, int], ...] = (
            (64, "forward", 16384), (64, "backward", 16384), (1, "forward", 2048),
        )  # fmt: skip
        for heads, way, length in asked:
            curves = rates.find(on, "bfloat16", 128, way, heads=heads, kv_heads=-(-heads // 8))
            rate = curves.causal[[*curves.rows].index(length)] / 1e12
            figures.append(f"{rate:.0f}")
        _, _, _, peak, calls_of_64, one_head, memory, near, far, _ = by_name[name]
        assert (calls_of_64, one_head) == (", ".join(figures[:2]), figures[2]), name
        assert on.memory
        assert (float(peak), float(memory)) == (on.peak["bfloat16"] / 1e12, on.memory / 1e9)
        for cell, link in ((near, on.inner), (far, on.outer)):
            assert float(cell.split()[0]) == link.bandwidth / 1e9, name


TABLES = {
    "attention_causal": """system,rows,heads,kv_heads,head_dim,window,ms,kernel
h100_sxm,2048,8,1,128,0,0.0370,sglang 0.5.14 fa3
h100_sxm,1500,5,5,128,0,9.0,sglang 0.5.14 fa3
""",
    "attention_mla": """system,rows,heads,ms,kernel
b200_sxm,2048,16,1.0,trtllm 1.3.0rc20 default
""",
    "products": """system,m,n,k,ms,kernel
l40s,2048,4096,4096,1.0,vllm 0.24.0
""",
    "collectives": """system,operation,gpus,elements,ms,nccl
h100_sxm,all_gather,8,134217728,0.72884,nccl 2.29.2
""",
}


def test_tables_are_checked_and_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).resolve().parents[3]
    monkeypatch.syspath_prepend(str(root / "experiments" / "measured"))
    check, pack = importlib.import_module("check"), importlib.import_module("pack")
    for name, text in TABLES.items():
        (tmp_path / f"{name}.csv").write_text(text)
    monkeypatch.setattr(sys, "argv", ["check.py", str(tmp_path)])
    check.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    by_name = {" ".join(line[:-3]): line[-3:] for line in lines}
    assert by_name["attention all"][0] == "3"
    assert by_name["attention causal h100_sxm"][0] == "2"
    assert float(by_name["attention causal h100_sxm"][2].rstrip("%")) > 80  # 9 ms are wrong
    assert by_name["collectives all"] == ["1", "0.0%", "0.0%"]

    # What is packed is what predictions read; curves of a kind have the same rows.
    with pytest.raises(SystemExit, match=r"causal \(128, 0, 5, 5\) has other columns"):
        pack.packed(pack.read(tmp_path))
    (tmp_path / "attention_causal.csv").unlink()
    texts = pack.packed(pack.read(tmp_path))
    assert set(texts) == {"h100_sxm", "b200_sxm", "l40s"}
    assert "source a vllm 0.24.0" in texts["l40s"]
    monkeypatch.setattr(measured, "FOLDER", tmp_path)
    (tmp_path / "other.curves").write_text(texts["l40s"])
    table = measured.read("other")["product"]
    assert (table.at.tolist(), table.seconds[4096, 4096].tolist()) == ([2048], [1e-3])


@pytest.mark.parametrize("name", TABLED)
@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce"])
def test_further_nodes_make_no_collective_faster(name: str, operation: Operation) -> None:
    node = hardware.parse_fleet(name)
    nodes = replace(node, nodes=2)
    for size in (1e4, 1e6, 1e8, 1e10):
        alone = collectives.seconds(node, operation, node.ranks, size)
        assert alone <= collectives.seconds(nodes, operation, nodes.ranks, size)


def test_shards_over_nodes_take_their_nodes_links_as_long_as_on_one() -> None:
    model, request = named("llama-3b", {}), partial(Training, 32768, 16)
    node = hardware.parse_fleet("l40s")

    def shards_s(nodes: int) -> float:
        on, degrees = replace(node, nodes=nodes), Degrees(node.ranks * nodes, 1, 1, 1)
        free = Cost(0, 0, 0, 0, 0.0, 1.0, 0.0, 0.0, 0.0, 0, 0)
        return transformer.step(model, degrees, request(), on, free, free).shards

    assert shards_s(2) == pytest.approx(shards_s(1) / 2)  # half as many sequences a rank
