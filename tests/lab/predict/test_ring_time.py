"""Time of a trial on a ring: what is merged, and what long triangles reach."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from ringray import transport
from ringray.lab.predict import cost_model, hardware, rates
from ringray.lab.predict.hardware import Curve, Fleet, Hardware, Link
from ringray.lab.trial.config import TrialConfig
from tests.support.point import point

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
    found = cost_model.predict(config, fleet).time_ms
    return found - cost_model.predict(config, replace(fleet, hardware=faster)).time_ms


def test_a_ring_merges_each_later_chunk_and_a_gathered_pass_nothing(fleet: Fleet) -> None:
    elements = 1024 * 8 * 64
    # bf16 is read, fp32 written and read, the running output read and written: 2 + 4 * 4 bytes.
    ring_ms = 3 * elements * 18 / 0.85e12 * 1e3
    assert merging_ms(CONFIG, fleet) == pytest.approx(ring_ms)
    assert merging_ms(CONFIG.changed(dtype="float32"), fleet) == pytest.approx(ring_ms * 12 / 18)
    gathered = CONFIG.changed(transport="allgather")
    assert merging_ms(gathered, fleet) == pytest.approx(0)
    assert cost_model.predict(gathered, fleet).time_ms < cost_model.predict(CONFIG, fleet).time_ms


def test_owners_add_up_gathered_gradients(fleet: Fleet) -> None:
    both = CONFIG.changed(transport="allgather", direction="forward+backward")
    keys = 4096 * 2 * 4 * 64
    assert merging_ms(both, fleet) == pytest.approx(keys * 10 / 0.85e12 * 1e3)


def test_a_gathered_pass_has_the_rate_of_long_calls(fleet: Fleet) -> None:
    """Its queries meet the keys of all ranks in one call."""
    curve = fleet.hardware.attention[0].model_copy(update={"rates": {1024: 1e12, 2048: 2e12}})
    faster = fleet.hardware.model_copy(update={"attention": (curve,)})
    config = CONFIG.changed(transport="allgather")
    slow, fast = (
        cost_model.predict(config, replace(fleet, hardware=one)).time_ms
        for one in (fleet.hardware, faster)
    )
    assert fast == pytest.approx(slow / 2)


@pytest.mark.parametrize("cores", [None, 16])
@pytest.mark.parametrize("links", [0.2, 5.0])
def test_heads_are_gathered_while_others_are_computed(
    fleet: Fleet, cores: int | None, links: float
) -> None:
    """``links``: the time of messages over that of products."""
    config = CONFIG.changed(transport="allgather")
    groups = 4 / (transport.plan("allgather", 4, 8, 4).heads_at_once or 0)
    products = cost_model.predict(config, fleet).time_ms
    received = 3 * 1024 * 4 * 64 * 2 * 2  # bytes: three ranks' rows of K and V
    link = Link(bandwidth=received / (links * products / 1e3), latency=0.0)
    slower = fleet.hardware.model_copy(update={"inner": link, "cores": cores})
    found = cost_model.predict(config, replace(fleet, hardware=slower)).time_ms
    assert found == pytest.approx(products * (max(1, links) + min(1, links) / groups))


def test_ranks_of_ulysses_share_the_cores_of_their_own_host(fleet: Fleet) -> None:
    config = CONFIG.changed(transport="ulysses")
    one_core = fleet.hardware.model_copy(update={"cores": 1})
    apart, together = (
        cost_model.predict(config, replace(fleet, hardware=one_core, nodes=nodes, per_node=ranks))
        for nodes, ranks in ((4, 1), (1, 4))
    )
    assert together.time_ms == pytest.approx(4 * apart.time_ms)


def test_triangles_approach_squares_beyond_the_known_rows() -> None:
    known = rates.Rates(*np.array([[1024.0, 2048.0], [100.0, 100.0], [60.0, 80.0], [60.0, 80.0]]))

    def rate(rows: float) -> float:
        at = np.array([rows])
        return float(1 / known.seconds(np.ones(1), at, at, at * at / 2)[0])

    assert rate(1024) == pytest.approx(60)
    assert rate(2048) == pytest.approx(80)
    assert rate(4096) == pytest.approx(100 / 1.125)  # loses half of the quarter at 2048
    assert 99 < rate(2048 * 64) < 100


def test_blocks_with_a_mask_compute_more_than_is_visible() -> None:
    """Of 512 rows two blocks of 256 have a mask, of 768 four of 192."""
    rows = np.array([512.0, 1024.0])
    known = rates.Rates(rows, *np.full((3, 2), 100.0))

    def rate(rows: float, *, stepped: bool) -> float:
        at = np.array([rows])
        return float(1 / known.seconds(np.ones(1), at, at, at * at / 2, stepped)[0])

    assert rate(768, stepped=False) == pytest.approx(100)
    assert rate(512, stepped=True) == pytest.approx(100 / 1.5)
    assert rate(768, stepped=True) == pytest.approx(100 / 1.25)


def test_a_measured_curve_of_steps_holds_at_its_rows(fleet: Fleet) -> None:
    full = fleet.hardware.attention[0]
    stepped = full.model_copy(update={"stepped": True, "rates": {512: 4e11, 1024: 5e11}})
    hardware = fleet.hardware.model_copy(update={"attention": (full, stepped)})
    known = rates.find(hardware, "bfloat16", 64, "forward")
    at = np.array([512.0, 1024.0])
    assert 1 / known.seconds(np.ones(2), at, at, at * at / 2, True) == pytest.approx([4e11, 5e11])


def test_only_folded_rows_see_others_in_steps(fleet: Fleet) -> None:
    """Between ranks, and where keys are gathered also rows that are evenly spaced."""
    full = fleet.hardware.attention[0]
    slow = full.model_copy(update={"stepped": True, "rates": {4096: 1e11}})
    stepped = fleet.hardware.model_copy(update={"attention": (full, slow)})

    def slower(partition: str, transport: str) -> bool:
        config = CONFIG.changed(causal=True, partition=partition, transport=transport)
        one, other = (
            cost_model.predict(config, replace(fleet, hardware=one)).time_ms
            for one in (fleet.hardware, stepped)
        )
        return other > 1.5 * one

    assert [slower(one, "ring") for one in ("contiguous", "striped", "zigzag")] == [False] * 3
    assert slower("zigzag-token", "ring")
    assert slower("striped", "allgather")
    assert not slower("zigzag", "allgather")
