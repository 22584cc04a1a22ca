"""Sweeps that are measured again: what stands, what is measured and why; rings are stand-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.sweep_world import Rings, World

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_other_code_is_measured_and_the_older_measurement_stands_again(world: World) -> None:
    summary, notes = world.run()
    assert (summary.measured, notes, world.medians()) == (3, [], [1.0, 2.0, 3.0])
    world.checkout("b")
    summary, notes = world.run()
    assert (summary.measured, world.medians()) == (3, [4.0, 5.0, 6.0])
    assert notes == [
        "to be measured again: 3 trials, measured with other code in ranks at commit aaaaaaa"
    ]
    for code, medians in (("a", [1.0, 2.0, 3.0]), ("b", [4.0, 5.0, 6.0])):
        world.checkout(code)
        for _ in range(2):
            summary, notes = world.run()
            assert (summary.measured, world.medians()) == (0, medians)
            assert notes == [
                f"taken from before: 3 trials of commit {code * 7}, the same code in ranks"
            ]
    assert world.earlier() == [1.0, 2.0, 3.0]
    world.here["git"] = {"commit": "c" * 40, "dirty": True}  # which changes nothing in ranks
    assert world.run()[0].measured == 0


@pytest.mark.parametrize(
    ("part", "change", "why"),
    [
        ("hardware", {"cores": 99}, "measured with other hardware (cores)"),
        ("versions", {"torch": "99.0"}, "measured with other versions (torch)"),
    ],
)
def test_another_machine_is_another_measurement(
    world: World, part: str, change: dict[str, Any], why: str
) -> None:
    world.run()
    world.here[part] |= change
    summary, notes = world.run()
    assert (summary.measured, notes) == (3, [f"to be measured again: 3 trials, {why}"])
    assert world.earlier() == [1.0, 2.0, 3.0]


def test_again_measures_everything_once_more_and_loses_nothing_if_interrupted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run()
    monkeypatch.setattr(Rings, "most", 4)
    summary, notes = world.run(again=True)
    assert summary.interrupted
    assert notes == ["to be measured again: 3 trials, --again"]
    assert (world.medians(), world.earlier()) == ([4.0, 2.0, 3.0], [1.0])
    monkeypatch.setattr(Rings, "most", 10**9)
    assert world.run()[0].measured == 0, "every trial has a measurement that stands"
    assert world.run(again=True)[0].measured == 3
    assert (world.medians(), world.earlier()) == ([5.0, 6.0, 7.0], [1.0, 2.0, 3.0, 4.0])
    assert world.run()[0].measured == 0
    assert world.medians() == [5.0, 6.0, 7.0], "the newest of one identity is current"
