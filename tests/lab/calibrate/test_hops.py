"""How large the messages are that time a link, by a link whose clock is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from ringray.comm.ring import connect
from ringray.lab.calibrate import machine
from ringray.lab.calibrate.hops import HopTimer

if TYPE_CHECKING:
    from torch import Tensor

SIZES = machine.SIZES["cpu"].hops
SECONDS = 0.8


class KnownLink(HopTimer):
    """A link of so many bytes/s, whose sample number ``hiccup`` is late by half a second."""

    def __init__(self, bandwidth: float, latency: float, hiccup: int = -1) -> None:
        super().__init__(connect(None), torch.device("cpu"))
        self.bandwidth, self.latency, self.hiccup, self.spent = bandwidth, latency, hiccup, 0.0

    def sample(self, chunk: Tensor, count: int | None = None) -> tuple[float, float]:
        took = self.latency + chunk.nbytes / self.bandwidth + (0.5 if self.hiccup == 0 else 0.0)
        self.hiccup -= 1
        self.spent += took * (1 + (count or 1))
        return took, 0.0


@pytest.mark.parametrize("bandwidth", [1e5, 1e6, 24e6, 1.2e9, 5e10])
@pytest.mark.parametrize("latency", [1e-5, 1e-3])
def test_a_link_is_known_in_its_time(bandwidth: float, latency: float) -> None:
    link = KnownLink(bandwidth, latency)
    (small, least), (large, most) = link.ends(SIZES, SECONDS)
    found, byte = machine.line((small, large), [[least, most]])
    assert found == pytest.approx(latency + small / bandwidth, rel=1e-3)
    assert 1 / byte == pytest.approx(bandwidth * large / (large - small), rel=1e-6)
    assert link.spent < 2 * SECONDS, "rounds of 16 nodes end in half a minute"
    if bandwidth < 1e9:
        assert large / bandwidth > SECONDS / 16, "its time is that of its bytes"
    else:
        assert large == SIZES[-1]


@pytest.mark.parametrize("late", [0, 1])
def test_a_small_hop_that_is_late_changes_nothing(late: int) -> None:
    usual, found = (KnownLink(24e6, 1e-4, at).ends(SIZES, SECONDS) for at in (-1, late))
    for (size, seconds), (other, others) in zip(usual, found, strict=True):
        assert (size, seconds) == (other, pytest.approx(others, rel=1e-3))
