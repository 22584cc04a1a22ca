"""The cost model: measured memory, exact counts, times on a ring; and the table of hardware."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import ringray
from ringray.base import provenance
from ringray.base.errors import UserError
from ringray.lab.predict import cost_model, hardware, rates
from ringray.lab.predict.hardware import Curve, Direction, Fleet, Hardware, Link
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.measurement import peak_memory
from tests.support.point import point


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Each thread of a fused call has scratch memory of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_one_rank_is_near_its_prediction(
    dtype: str, kv_heads: int, backward: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(1, heads, 2048, 64) for heads in (8, kv_heads, kv_heads, 8)]
    *inputs, dout = (torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes)
    leaves = [x.requires_grad_(backward) for x in inputs]

    def work() -> None:
        out = ringray.ring_attention(*leaves)
        if backward:
            assert isinstance(out, torch.Tensor)
            torch.autograd.grad(out, leaves, dout)

    live = sum(x.numel() * x.element_size() for x in [*leaves, *([dout] if backward else [])])
    measured = live + peak_memory(work, torch.device("cpu"))
    direction = "forward+backward" if backward else "forward"
    config = point(seq_len=2048, kv_heads=kv_heads, dtype=dtype, direction=direction)
    cost = cost_model.predict(config, hardware.cpu(1, **provenance.bf16_products()))
    assert cost.peak_memory_bytes == pytest.approx(measured, rel=0.1)


def test_a_rank_keeps_what_it_received_to_walk_back() -> None:
    """Not the most that any rank receives in each lane."""
    config = point(ring_size=16, seq_len=4096, documents=(1500, 2596), transport="direct")
    moved = cost_model.choose_walks(config).forward
    received = int(moved.route.by_rank(moved.chunk_rows.sum(0)).sum(1).max())
    planned, back = (
        cost_model.predict(config.changed(backward=way), hardware.cpu(2)).peak_memory_bytes
        for way in ("planned", "reverse")
    )
    row = 2 * config.problem.kv_heads * config.problem.head_dim * 4
    assert received * row / 2 < back - planned < received * row


def test_the_baseline_of_decoding_is_one_step() -> None:
    """Not the attention of all tokens to each other."""
    config = point(seq_len=1 << 20, new_tokens=4, ring_size=8, direction="forward", baseline="sdpa")
    on = hardware.cpu(8)
    alone = cost_model.alone_s(config, on)
    bytes_read = (1 << 20) * 2 * 8 * 64 * 4
    assert alone == pytest.approx(bytes_read / on.hardware.memory_bandwidth, rel=1.0)


def test_ranks_that_decode_share_the_cores_of_their_own_node() -> None:
    config = point(seq_len=1 << 16, new_tokens=1, ring_size=4, threads=2, direction="forward")
    machine = hardware.cpu(2)

    def computing_ms(nodes: int, per_node: int) -> float:
        cost = cost_model.predict(config, replace(machine, nodes=nodes, per_node=per_node))
        return cost.time_ms - cost.exposed_ms - machine.hardware.op * 1e3

    alone = computing_ms(4, 1)
    assert computing_ms(2, 2) == pytest.approx(2 * alone)
    # A node may hold more ranks than the ring has.
    assert computing_ms(1, 4) == computing_ms(1, 16) == pytest.approx(4 * alone)


def test_counts_beyond_64_bits_are_exact() -> None:
    config = point(
        ring_size=4, seq_len=1 << 30, batch=1 << 15, heads=64, kv_heads=64, head_dim=256,
        dtype="float32", causal=False, direction="forward",
    )  # fmt: skip
    sent = 3 * (1 << 30) * (1 << 15) * 64 * 2 * 256 * 4
    assert sent > 1 << 63
    assert cost_model.predict(config, hardware.cpu(2)).sent_bytes == sent


# Time on a ring

CONFIG = point(
    ring_size=4, threads=1, dtype="bfloat16", seq_len=4096, batch=1, heads=8, kv_heads=4,
    head_dim=64, causal=False, window=None, documents=None, direction="forward", transport="ring",
    backward="auto", backend="auto", blocks=None, partition="contiguous", device="cuda",
    placement="spread", warmup=1, repeats=1, seed=0, baseline=None, baseline_threads=None,
    replica=0,
)  # fmt: skip


@pytest.fixture
def fleet() -> Fleet:
    """Ranks of 1 TFLOP/s at any length whose messages take no time."""
    link = Link(bandwidth=1e30, latency=0.0)
    curves = tuple(
        Curve(dtype="bfloat16", head_dim=64, direction=way, causal=False, rates={64: 1e12})
        for way in get_args(hardware.Direction)
    )
    device = Hardware(
        title="test", memory_bandwidth=1e12, peak={"bfloat16": 2e12}, ranks_per_node=8,
        inner=link, outer=link, products=0.5, attention=curves,
    )  # fmt: skip
    return Fleet("test", device, 1, 8)


def merging_ms(config: TrialConfig, fleet: Fleet) -> float:
    """Returns what memory adds to the products."""
    faster = fleet.hardware.model_copy(update={"memory_bandwidth": 1e30})
    whole_ms = cost_model.predict(config, fleet).time_ms
    return whole_ms - cost_model.predict(config, replace(fleet, hardware=faster)).time_ms


def test_a_ring_merges_each_later_chunk_and_a_gathered_pass_nothing(fleet: Fleet) -> None:
    elements = 1024 * 8 * 64
    # bf16 is read, fp32 written and read, the running output read and written: 2 + 4 * 4 bytes.
    ring_ms = 3 * elements * 18 / 0.85e12 * 1e3
    assert merging_ms(CONFIG, fleet) == pytest.approx(ring_ms)
    assert merging_ms(CONFIG.changed(dtype="float32"), fleet) == pytest.approx(ring_ms * 12 / 18)
    gathered = CONFIG.changed(transport="allgather")
    assert merging_ms(gathered, fleet) == pytest.approx(0)
    assert cost_model.predict(gathered, fleet).time_ms < cost_model.predict(CONFIG, fleet).time_ms


def test_only_folded_rows_see_others_in_steps(fleet: Fleet) -> None:
    """Between ranks, and where keys are gathered also rows that are evenly spaced."""
    full = fleet.hardware.attention[0]
    slow = full.model_copy(update={"stepped": True, "rates": {4096: 1e11}})
    stepped = fleet.hardware.model_copy(update={"attention": (full, slow)})

    def slower(partition: str, transport: str) -> bool:
        config = CONFIG.changed(causal=True, partition=partition, transport=transport)
        plain, other = (
            cost_model.predict(config, replace(fleet, hardware=device)).time_ms
            for device in (fleet.hardware, stepped)
        )
        return other > 1.5 * plain

    assert [slower(name, "ring") for name in ("contiguous", "striped", "zigzag")] == [False] * 3
    assert slower("zigzag-token", "ring")
    assert slower("striped", "allgather")
    assert not slower("zigzag", "allgather")


def test_ranks_of_ulysses_share_the_cores_of_their_own_host(fleet: Fleet) -> None:
    config = CONFIG.changed(transport="ulysses")
    one_core = fleet.hardware.model_copy(update={"cores": 1})
    apart, together = (
        cost_model.predict(config, replace(fleet, hardware=one_core, nodes=nodes, per_node=ranks))
        for nodes, ranks in ((4, 1), (1, 4))
    )
    assert together.time_ms == pytest.approx(4 * apart.time_ms)


@pytest.mark.parametrize(("sharing", "slower"), [(1, 1), (2, 2), (8, 4)])
def test_heads_for_rows_cross_the_port_that_ranks_of_a_node_share(
    sharing: int, slower: int, fleet: Fleet
) -> None:
    """A port for eight carries the messages of the four ranks that its node has."""
    config = CONFIG.changed(ring_size=8, transport="ulysses", kv_heads=8)

    def moving_ms(ranks: int) -> float:
        port = Link(bandwidth=1e9, latency=0.0, ranks=ranks)
        device = fleet.hardware.model_copy(update={"outer": port})
        two_nodes = replace(fleet, hardware=device, nodes=2, per_node=4)
        return cost_model.predict(config, two_nodes).exposed_ms

    assert moving_ms(sharing) == pytest.approx(slower * moving_ms(1))


# The table of hardware: complete entries with figures that devices can have

DEVICES = (
    "a100", "h100", "h800", "h200", "b200", "b300", "gb200", "gb300", "mi300x", "l40s",
    "rtx-pro-6000", "tpu-v3", "tpu-v4", "tpu-v5e",
)  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_an_entry_is_complete_and_of_a_device(name: str) -> None:
    entry = hardware.table()[name]
    assert {"bfloat16", "float32"} <= set(entry.peak)
    measured = {
        (curve.direction, curve.causal) for curve in entry.attention if curve.head_dim == 128
    }
    # Measured tables have full calls, too, or what a causal one says of them.
    masks = (True,) if entry.tables else (False, True)
    assert measured >= {(way, c) for way in ("forward", "backward") for c in masks}
    assert entry.price is None  # it changes by the week
    assert any(
        "data sheet" in source or "docs" in source or "chip" in source for source in entry.sources
    )
    assert not re.search(r"pypi|conda|npmjs", " ".join(entry.sources))

    assert 1e14 <= entry.peak["bfloat16"] <= 3e15  # dense
    assert entry.peak["float32"] < entry.peak["bfloat16"]
    assert 10e9 <= entry.memory <= 300e9
    assert 5e11 <= entry.memory_bandwidth <= 1e13
    assert 1e9 <= entry.outer.bandwidth < entry.inner.bandwidth * 1.1
    assert entry.inner.bandwidth < entry.memory_bandwidth
    assert 1e-7 <= entry.inner.latency < entry.outer.latency < 1e-3
    assert 0.4 <= entry.products < 0.95


@pytest.mark.parametrize("name", [*DEVICES, "cpu"])
def test_attention_is_slower_than_the_peak_and_faster_with_more_rows(name: str) -> None:
    entry = hardware.table()[name]
    ways: tuple[Direction, ...] = ("forward", "backward")
    for way, dim in itertools.product(ways, (64, 128)):
        curves = rates.find(entry, "bfloat16", dim, way, heads=64, kv_heads=8)
        for by_rows in (curves.full, curves.causal):
            assert max(by_rows) < 0.85 * entry.peak["bfloat16"], (way, dim)
            assert np.all(by_rows[1:] > 0.9 * by_rows[:-1]), (way, dim)
            assert by_rows[-1] > 1.05 * by_rows[0]


MINE = """mine:
  title: mine
  memory: 8.0e+10
  memory_bandwidth: 1.0e+12
  peak: {float32: 1.0e+14}
  ranks_per_node: 8
  inner:
    bandwidth: 1.0e+11
    latency: 1.0e-6
  outer: {bandwidth: 1.0e+10, latency: 1.0e-5}
  products: 0.7
  attention:
  - dtype: float32
    causal: false
    head_dim: 64
    direction: forward
    rates: {1024: 1.0e+13}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: mine", "titel: mine", "mine.titel: field: got 'titel', expected one of title,"),
        ("8.0e+10", "80 GB", "mine.memory: got '80 GB', expected a valid number"),
        ("peak: {float32: 1.0e+14}", "peak: {float23: 1.0e+14}", "did you mean 'float32'?"),
        ("{1024: 1.0e+13}", "{1024: 1.0e+30}", "far beyond the peak; both are FLOP/s"),
        ("{1024: 1.0e+13}", "{1024: 170}", "got 170, expected FLOP/s, at least 1e+06"),
        ("8.0e+10", "80", "mine.memory: got 80, expected 1e+08 to 1e+30 bytes"),
        ("8.0e+10", ".nan", "mine.memory: got nan, expected 1e+08 to 1e+30 bytes"),
        ("1.0e+12", "864", "mine.memory_bandwidth: got 864, expected 1e+06 to 1e+30 bytes/s"),
        ("1.0e+14", "362", "mine.peak.float32: got 362, expected 1e+06 to 1e+30 FLOP/s"),
        ("1.0e+11", "11", "mine.inner.bandwidth: got 11, expected 1e+06 to 1e+30 bytes/s"),
        ("1.0e-6", "20", "mine.inner.latency: got 20, expected 0 to 1 seconds"),
        ("products: 0.7", "products: 0.7\n  host: 24", "mine.host: got 24, expected 1e+06 to"),
    ],
)
def test_a_wrong_file_is_told_by_its_field(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    assert hardware.read_entries(path)["mine"].ranks_per_node == 8
    assert MINE.count(old) == 1
    path.write_text(MINE.replace(old, new))
    with pytest.raises(UserError) as caught:
        hardware.parse_fleet(f"{path}:2x4")
    lines = [line for line in str(caught.value).splitlines() if line.startswith(f"{path}: ")]
    assert any(message in line for line in lines), str(caught.value)
