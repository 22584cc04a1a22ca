"""Ranks that measure side by side: one is killed, then the search is interrupted and taken up."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from ringray.tuning import table as tuned
from tests.support import place as drive

if TYPE_CHECKING:
    from ringray.lab.trial.outcome import TrialRow
    from tests.support.place import Place

pytestmark = pytest.mark.chaos

CUTS = """\
version: 1
name: cuts
kind: kernel-tune
ring: {size: 2, device: cpu, threads: [1, 2]}
problem: {seq_len: 2048, heads: 2, head_dim: 32, dtype: float32, direction: forward}
measure: {warmup: 1, repeats: 40, baseline: null}
"""


def measured(place: Place) -> dict[str, TrialRow]:
    if not place.sweeps():
        return {}
    return {row.key: row for row in place.trials("cuts") if row.status == "ok"}


def test_a_killed_rank_and_ctrl_c_lose_nothing(place: Place) -> None:
    spec = place.spec(CUTS)
    search = place.start("tune", spec, "--no-tracking")
    drive.wait_until("a first cut", lambda: measured(place))
    killed = place.ranks()[0]
    killed.kill()

    def replaced() -> bool:
        pids = [rank.pid for rank in place.ranks()]
        return killed.pid not in pids and len(pids) == 2

    drive.wait_until("a new ring", replaced)
    drive.wait_until("three cuts", lambda: len(measured(place)) >= 3)
    search.send_signal(signal.SIGINT)
    done = place.end(search)
    assert done.code == 130, done.out + done.err
    assert "trying again on a new ring" in done.out
    assert not (place.home / "tuned").exists()
    before = measured(place)
    again = place.run("resume", "cuts", "--no-tracking")
    assert again.code == 0, again.out + again.err
    after = measured(place)
    assert len(after) == 2 * 6
    assert {key: after[key] for key in before} == before
    if "tuned:  nothing" not in again.out:  # as on a busy machine
        # Threads are searched, not another problem.
        (entry,) = tuned.read(place.home / "tuned" / "local.json")
        best = min(after.values(), key=lambda row: row.metrics["median_ms"]).config
        assert entry.bucket.threads == entry.choice["threads"] == best["threads"]
        assert entry.choice["blocks"] == best["blocks"]
    place.check_nothing_is_left()
