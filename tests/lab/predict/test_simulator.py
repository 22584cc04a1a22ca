"""Ranks and links, step by step: times worked out by hand, messages of the very scripts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ringray import transport
from ringray.lab.predict import cost_model
from ringray.lab.predict.hardware import Fleet, Hardware, Link, Noise, entry
from ringray.lab.predict.simulator import Cores, PassWork, RingRanks, simulate
from ringray.lab.ring.order import RankLocation, crossings, ordered
from ringray.lab.trial.config import TrialConfig
from ringray.partition import PARTITIONS, padded_length
from ringray.traffic import hulls, script, walk
from ringray.traffic.geometry import Layout
from ringray.traffic.hulls import Weights
from ringray.traffic.mask import Mask
from ringray.traffic.routes import around
from tests.support.point import point

# Bytes of a message of one row are its seconds within a node, ten times as many between nodes.
LINKS = {
    "title": "a clock", "memory_bandwidth": 1e30, "peak": {"float32": 1e6}, "ranks_per_node": 64,
    "products": 1.0, "call": 0.0,
    "attention": [
        {"dtype": "float32", "head_dim": 1, "direction": way, "causal": False, "rates": {1: 1e6}}
        for way in ("forward", "backward")
    ],
    "inner": {"bandwidth": 1.0, "latency": 0.0}, "outer": {"bandwidth": 0.1, "latency": 0.0},
}  # fmt: skip


def clock(**changed: Any) -> Hardware:
    """An entry whose links are slower than those of any hardware."""
    fields = {**LINKS, **changed}
    links = {name: Link.model_construct(**fields[name]) for name in ("inner", "outer")}
    return entry(fields | links, "test")


def ring(
    ranks: int, per_node: int = 64, *, row: int = 1, seconds: float = 0.0,
    order: tuple[int, ...] | None = None, **more: object,
):  # fmt: skip
    """One forward pass of full attention; each rank holds one row."""
    moved = hulls.traffic(Layout("contiguous", ranks, ranks), Mask(ranks, causal=False),
                         around(ranks, +1), "keys")  # fmt: skip
    fleet = Fleet("clock", clock(**more), -(-ranks // per_node), per_node, order=order)
    return run(moved, np.full((ranks, ranks), seconds), row, fleet)


def run(moved: hulls.Traffic, seconds: Any, row: int, fleet: Fleet) -> Any:
    """One forward pass; ``row``: bytes of a row of its messages."""
    work = PassWork("forward", moved, Weights(row, 0), 1, "float32", 1)
    return simulate(work, seconds, RingRanks(fleet))


def test_what_is_longer_counts_at_each_step_but_the_last() -> None:
    """Of four ranks, three steps hide messages behind computation or the other way round."""
    assert ring(4, row=2, seconds=5.0).ended == pytest.approx(4 * 5)
    assert ring(4, row=5, seconds=2.0).ended == pytest.approx(3 * 5 + 2)
    assert ring(
        4, row=5, seconds=2.0, inner={"bandwidth": 1, "latency": 0.5}
    ).ended == pytest.approx(3 * 5.5 + 2)
    assert ring(1, row=5, seconds=2.0).ended == pytest.approx(2)


def test_ranks_that_share_cores_slow_each_other_alike() -> None:
    """Four ranks on two cores: three of them work on when the first has ended, then two."""
    fleet = Fleet("clock", clock(cores=2), 1, 64)
    work = np.array([4.0, 1.0, 3.0, 2.0])
    assert Cores(fleet, 4).elapsed(work) == pytest.approx([5.5, 2.0, 4.5, 3.5])
    assert Cores(fleet, 2).elapsed(work[:2]) == pytest.approx([4, 1])
    assert Cores(fleet, 2, per_rank=2).elapsed(work[:2]) == pytest.approx([5, 2])
    folded = replace(fleet, stride=2)  # each stands for two that do the same
    assert Cores(folded, 2).elapsed(work[:2]) == pytest.approx([5, 2])
    nodes = replace(fleet, nodes=2, per_node=2)
    assert Cores(nodes, 4).elapsed(work) == pytest.approx(work)
    assert Cores(replace(fleet, hardware=clock()), 4).elapsed(work) == pytest.approx(work)
    assert ring(4, row=0, seconds=5.0, cores=2).ended == pytest.approx(4 * 5 * 2)


def test_the_slowest_link_paces_the_ring() -> None:
    done = ring(4, per_node=2, row=1)
    assert done.ended.max() == pytest.approx(3 * 10)
    assert done.outer_bytes == 6


def test_ranks_in_another_order_cross_more_often_and_share_ports() -> None:
    """Two nodes of two: in order each sends one message across at a step, then two."""
    shared = {"bandwidth": 0.1, "latency": 0, "ranks": 4}  # more than a node has
    assert ring(4, per_node=2, outer=shared).ended.max() == pytest.approx(3 * 10)
    mixed = ring(4, per_node=2, outer=shared, order=(0, 2, 1, 3))
    assert mixed.ended.max() == pytest.approx(3 * 20)
    assert mixed.outer_bytes == 12
    assert ring(4, per_node=1, outer=shared).ended.max() == pytest.approx(3 * 10)


@pytest.mark.parametrize("seed", range(2))
def test_a_prediction_crosses_nodes_as_the_ring_will(seed: int) -> None:
    config = point(ring_size=8, seq_len=128, causal=False, partition="contiguous", seed=seed)
    on = Fleet("clock", clock(outer={"bandwidth": 0.1, "latency": 0.0, "ranks": 2}), 4, 2)
    along = ordered([RankLocation(str(i // 2)) for i in range(8)], 8, "shuffled", seed=seed)
    crossing = crossings([str(at // 2) for at in along])
    assert crossing > 4
    straight, mixed = (
        cost_model.predict(config.changed(order=order), on) for order in ("topology", "shuffled")
    )
    assert mixed.outer_bytes / straight.outer_bytes == pytest.approx(crossing / 4)
    assert mixed.time_ms > straight.time_ms
    spans = cost_model.timelines(config.changed(order="shuffled"), on, 8)
    assert 1e3 * max(one.ended for some in spans.values() for one in some) == pytest.approx(
        mixed.time_ms
    )


def test_a_straggler_delays_all_and_noise_repeats() -> None:
    fleet = Fleet("clock", clock(), 1, 64)
    moved = hulls.traffic(Layout("contiguous", 4, 4), Mask(4, causal=False), around(4, +1), "keys")

    def end(noise: Noise | None) -> float:
        done = run(moved, np.ones((4, 4)), 0, replace(fleet, noise=noise))
        return float(done.ended.max())

    assert end(None) == end(Noise()) == 4
    assert end(Noise(slow={2: 3.0})) == pytest.approx(12)
    jittered = Noise(jitter=0.1, seed=7)
    assert end(jittered) == end(jittered) != end(Noise(jitter=0.1, seed=8))


@pytest.mark.parametrize("name", transport.TRANSPORTS)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_messages_are_those_of_the_scripts(name: str, partition: str) -> None:
    """The spans of all ranks hold every message of the scripts, with its bytes."""
    ranks, mask = 6, Mask(97, window=40)
    exchange = transport.plan(name, ranks, 6, 6)
    ring_size = ranks // exchange.fold
    layout = Layout(partition, padded_length(partition, 97, ranks), ring_size, exchange.fold)
    weights = walk.costs(4, 1, 6, 6, 8)
    walks = walk.choose(layout, mask, exchange.routes, "planned", weights)
    for which, moved, weight in (
        ("forward", walks.forward, weights.forward),
        ("backward", walks.backward, weights.planned),
    ):
        work = PassWork(which, moved, weight, 1, "float32", 1)
        ranks_on = RingRanks(Fleet("clock", clock(), 1, 64), record=range(ring_size))
        done = simulate(work, np.ones((ring_size, ring_size)), ranks_on)
        for rank, spans in done.spans.items():
            mine = script.write(moved, which, layout.rows, rank)
            want = {
                (f"{which}, step {at}", text): sum(
                    one.rows.size * (weight.chunk if one.chunk else weight.sums)
                    for one in batch if one.send
                )
                for at, step in enumerate(mine.steps)
                for _, text, batch in step.batches
            }  # fmt: skip
            sent = {
                (span.hop, frozenset(span.label.split(", "))): span.sent
                for span in spans
                if span.kind == "transfer"
            }
            assert sent == {
                (hop, frozenset(text.split(", "))): size for (hop, text), size in want.items()
            }


def config(**more: Any) -> TrialConfig:
    return point(**{"ring_size": 8, "seq_len": 4096, **more})


@pytest.mark.parametrize("name", transport.TRANSPORTS)
def test_links_carry_what_is_sent(name: str) -> None:
    for direction, per_node in itertools.product(("forward", "forward+backward"), (1, 2, 4, 8)):
        fleet = Fleet("clock", clock(), 8 // per_node, per_node)
        cost = cost_model.predict(config(transport=name, direction=direction), fleet)
        assert cost.inner_bytes + cost.outer_bytes == cost.sent_bytes
        assert (cost.outer_bytes > 0, cost.inner_bytes > 0) == (per_node < 8, per_node > 1)
        assert cost.low_ms < cost.time_ms < cost.high_ms
        assert cost.exposed_ms >= -1e-6


@pytest.mark.parametrize("name", transport.TRANSPORTS)
def test_timelines_end_with_the_predicted_time(name: str) -> None:
    fleet, asked = Fleet("clock", clock(), 2, 4), config(transport=name)
    cost = cost_model.predict(asked, fleet)
    spans = cost_model.timelines(asked, fleet, 8)
    last = max(span.ended for some in spans.values() for span in some)
    assert last * 1e3 == pytest.approx(cost.time_ms)
    for some in spans.values():
        busy = [span for span in some if span.kind == "compute"]
        assert {span.hop.partition(",")[0] for span in busy} == {"forward", "backward"}
        assert all(a.ended <= b.began * (1 + 1e-9) for a, b in itertools.pairwise(busy))


def test_cores_handle_the_messages_of_their_ranks() -> None:
    """Three hops of four ranks: each sends and receives one message of 10 bytes at each."""
    links = {"inner": {"bandwidth": 1e30, "latency": 0.0}, "cores": 4}
    assert ring(4, row=10, copying=0.5, **links).ended == pytest.approx(3 * 5)
    assert ring(4, row=10, message=2.0, **links).ended == pytest.approx(3 * 2)
    assert ring(4, row=10, message=2.0, **links | {"cores": 2}).ended == pytest.approx(2 * 3 * 2)
    done = ring(4, row=10, step=1.0, seconds=3.0, **links)
    assert done.ended == pytest.approx(4 * 4)
    assert done.computed == pytest.approx(4 * 4)
