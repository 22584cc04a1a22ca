"""Rings over machines that have addresses of their own, and cables that can be pulled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from cluster.network import Machine, machines
from tests.chaos.struck import NODE, REPLICAS, begun, faults, recovered
from tests.support import place as drive
from tests.support import ray_heads
from tests.support.place import Place, tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.chaos


@pytest.fixture
def network() -> Iterator[tuple[str, list[Machine]]]:
    try:
        with machines(3) as made:
            yield made
    except PermissionError as error:
        pytest.skip(str(error))


def test_a_cable_is_pulled(place: Place, network: tuple[str, list[Machine]]) -> None:
    """Nothing is refused and nobody is told; the next ring is on machines that answer."""
    host, there = network
    text = tiny("cable", size=2, replicas=REPLICAS, repeats=60)
    text = text.replace("threads: 1", "threads: 1, placement: strict-spread")
    with ray_heads.cluster(place, NODE, NODE, NODE, host=host, machines=there) as head:
        driver = begun(place, text, "--address", head.address)
        cut = next(one for one in there if one.runs(place.ranks()[1].pid))
        _, fault = recovered(place, driver, "cable", cut.cut)
        assert fault["kind"] == "node-lost", fault
        assert fault["node"].startswith(cut.address)
        cut.mend()
        head.check_nothing_is_held()
        drive.wait_until("no rank is left", lambda: not place.ranks())


def test_a_cable_is_pulled_while_ranks_start(
    place: Place, network: tuple[str, list[Machine]]
) -> None:
    """Which takes them a while, in which they answer nothing."""
    host, there = network
    text = tiny("early", size=2, replicas=REPLICAS)
    text = text.replace("threads: 1", "threads: 1, placement: strict-spread")
    with ray_heads.cluster(place, NODE, NODE, NODE, host=host, machines=there) as head:
        driver = place.start("run", place.spec(text), "--no-tracking", "--address", head.address)
        victim = drive.wait_until("a rank starts", place.ranks)[0]
        assert "__init__" in drive.title(victim), "it has started already"
        cut = next(one for one in there if one.runs(victim.pid))
        since = time.time()
        cut.cut()
        done = place.end(driver)
        assert done.code == 0, done.out + done.err
        rows = place.trials("early")
        assert {row.status for row in rows} == {"ok"}
        (fault,) = [fault for row in rows for fault in faults(row)]
        # Found by the driver itself: Ray takes more than a minute.
        assert (fault["kind"], fault["hop"]) == ("node-lost", "its start"), fault
        assert fault["node"].startswith(cut.address)
        print(f"first trial after {min(row.ended or 0 for row in rows) - since:.1f} s")
        cut.mend()
        head.check_nothing_is_held()


def test_rings_side_by_side_lose_nothing_when_a_rank_dies(
    place: Place, network: tuple[str, list[Machine]]
) -> None:
    """Each has machines of its own."""
    host, there = network
    text = tiny("beside", size="[1, 2]", replicas=REPLICAS, repeats=40)
    text = text.replace("threads: 1", "threads: 1, concurrent: null, placement: strict-spread")
    with ray_heads.cluster(place, NODE, NODE, NODE, host=host, machines=there) as head:
        driver = begun(place, text, "--address", head.address)
        drive.wait_until("two rings", lambda: len(place.ranks()) == 3)
        holds = [one for one in there for rank in place.ranks() if one.runs(rank.pid)]
        assert len(set(holds)) == 3, "two ranks share a machine"
        place.ranks()[0].kill()
        done = place.end(driver)
        assert done.code == 0, done.out + done.err
        rows = place.trials("beside")
        assert [row.status for row in rows] == ["ok"] * 2 * REPLICAS
        assert sum(len(faults(row)) for row in rows) == 1
        times = [(row.started or 0, row.ended or 0, row.config["ring_size"]) for row in rows]
        beside = [1 for b, e, n in times for c, f, m in times if n < m and b < f and c < e]
        assert beside, "one ring waited for the other"
        head.check_nothing_is_held()
