"""A short campaign and a short soak; `make campaign` and `make soak` run the whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import campaign, soak
from tests.chaos.world import world
from tests.support import place as drive

pytestmark = pytest.mark.exhaustive


def test_faults_at_random_moments(tmp_path: Path) -> None:
    with world(tmp_path) as of:
        campaign.run(of, 20261121, iter([0]), faults=campaign.PER_SWEEP)


def test_nothing_grows(tmp_path: Path) -> None:
    for place in drive.place(tmp_path):
        watch = soak.run(place, trials=1000)
    assert watch.growths() == []
