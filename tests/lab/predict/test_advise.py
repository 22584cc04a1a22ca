"""Advice: the best of all degrees, what fits, and the longest context."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringray.base.errors import UserError
from ringray.lab.predict import advise, hardware
from ringray.lab.predict.advise import TrainingRequest
from ringray.models.sizes import named
from ringray.training.recipe import Degrees


def training_request(
    context: int = 1 << 17, sequences: int = 4, fleet: str = "h100:2x8", **given: int
) -> TrainingRequest:
    return TrainingRequest(
        named("8b", {}), hardware.parse_fleet(fleet), context, sequences, fixed=given
    )


def with_ports(of: TrainingRequest, ranks: int, bandwidth: float) -> TrainingRequest:
    outer = of.on.hardware.outer.model_copy(update={"ranks": ranks, "bandwidth": bandwidth})
    return replace(
        of, on=replace(of.on, hardware=of.on.hardware.model_copy(update={"outer": outer}))
    )


def test_no_degrees_are_faster_than_the_advised() -> None:
    asked = with_ports(training_request(fleet="h100:2x4"), 4, 5e9)
    found = advise.advise(asked, 3)
    every = [
        advise.advise(replace(asked, fixed=vars(degrees)), 1)[0]
        for degrees in advise.possible(asked)
        if advise.needed(asked, degrees).total <= asked.usable_bytes
    ]
    times = sorted(one.time.total for one in every)
    assert [one.time.total for one in found] == pytest.approx(times[:3])
    for one in every:
        assert advise._bound(asked, one.degrees) <= one.time.total
        assert one.memory.total <= asked.usable_bytes
    assert len({one.degrees for one in found}) == 3


def test_degrees_multiply_out() -> None:
    degrees = advise.possible(training_request())
    assert len(degrees) == len(set(degrees))
    for one in degrees:
        assert one.ranks == 16
        assert 8 % one.tp == 32 % one.pp == 4 % one.dp == 0
    assert Degrees(2, 2, 2, 2) in degrees
    assert advise.possible(training_request(tp=4, dp=2)) == [
        Degrees(2, 2, 4, 1),
        Degrees(2, 1, 4, 2),
    ]


def test_a_slow_network_is_what_limits() -> None:
    asked = with_ports(training_request(1 << 14, 16), 8, 1e9)
    best = advise.advise(replace(asked, fixed={"dp": 1, "pp": 1, "tp": 1}), 1)[0]
    assert "between nodes" in best.limit(asked.on)
    fast = with_ports(asked, 1, 1e12)
    assert advise.advise(fast, 1)[0].limit(asked.on) == "compute"


def test_a_ring_is_needed_where_nothing_else_fits() -> None:
    short = advise.smallest_ring(training_request(1 << 14, 16))
    assert short.degrees.cp == 1
    long = training_request(1 << 22, 1, dp=1, pp=1, tp=1)
    with pytest.raises(UserError):
        advise.advise(replace(long, on=hardware.parse_fleet("h100:8")), 1)
    few = advise.smallest_ring(training_request(1 << 20, 1, fleet="h100:8x8", pp=1, tp=4))
    assert few.degrees == Degrees(1, 16, 4, 1)


def test_the_longest_context_fits_and_no_longer() -> None:
    asked = training_request(1, 1, fleet="h100:4")
    reach = advise.max_context(asked)
    assert reach.memory.total <= asked.usable_bytes
    at = replace(asked, context=reach.context)
    assert advise.needed(at, reach.degrees).total <= asked.usable_bytes
    longer = replace(asked, context=int(reach.context * 1.02))
    for degrees in advise.possible(longer):
        assert advise.needed(longer, degrees).total > asked.usable_bytes
    twice = advise.max_context(training_request(1, 1, fleet="h100:8"))
    assert twice.context > 1.9 * reach.context


def test_memory_that_no_layout_has() -> None:
    with pytest.raises(UserError, match=r"fit into no layout.*DP 1 x CP 16.*more than can be used"):
        advise.advise(training_request(1 << 24, 1))
    big = TrainingRequest(named("405b", {}), hardware.parse_fleet("h100:1"), 1, 1)
    with pytest.raises(UserError, match="what helps: more ranks"):
        advise.max_context(big)
