"""``ringray doctor --cluster`` over machines whose links are shaped, or cut."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cluster.network import Machine, machines, payload
from tests.chaos.struck import NODE
from tests.support import place as drive
from tests.support import ray_heads

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

    from tests.support.place import Place
    from tests.support.ray_heads import Head

pytestmark = pytest.mark.chaos

FAST, SLOW = "40mbit", "8mbit"  # so few that a busy machine keeps up
DOCTOR = ("doctor", "--cluster", "--address")


@pytest.fixture
def network() -> Iterator[tuple[str, list[Machine]]]:
    try:
        with machines(4) as made:
            yield made
    except (FileNotFoundError, PermissionError) as error:
        pytest.skip(str(error))


@contextmanager
def started(place: Place, network: tuple[str, list[Machine]], nodes: int) -> Iterator[Head]:
    host, there = network
    with ray_heads.cluster(place, *[NODE] * nodes, host=host, machines=there[:nodes]) as head:
        for one in there:
            one.shape(FAST)
        yield head


def measured(place: Place, head: Head, code: int) -> dict[str, Any]:
    """What the doctor found; nothing of it is left."""
    done = place.run(*DOCTOR, head.address, "--json", "-")
    assert done.code == code, done.out + done.err
    check_no_probes(head)
    found: dict[str, Any] = json.loads(done.out)
    return found


def check_no_probes(head: Head) -> None:
    def held() -> list[Any]:
        actors = head.ask("/api/v0/actors?limit=1000")["data"]["result"]["result"]
        probes = [one for one in actors if one["class_name"] == "LinkProbe"]
        assert probes
        return [one for one in probes if one["state"] != "DEAD"]

    drive.wait_until("no probe is left", lambda: not held())


def check_rates(found: dict[str, Any], slow: set[tuple[int, int]]) -> None:
    for pair in found["pairs"]:
        one, other = sorted(found["nodes"][at]["name"] for at in pair["nodes"])
        at = int(one.rpartition(".")[2]) - 2, int(other.rpartition(".")[2]) - 2
        rate = payload(SLOW if at in slow else FAST)
        assert pair["error"] or 0.6 * rate < pair["bandwidth"] < 1.3 * rate, (pair, at)


def test_slow_hosts_and_slow_pairs_are_named(
    place: Place, network: tuple[str, list[Machine]]
) -> None:
    there = network[1]
    with started(place, network, 4) as head:
        there[3].shape(SLOW)
        found = measured(place, head, 0)
        check_rates(found, slow={(0, 3), (1, 3), (2, 3)})
        assert len(found["pairs"]) == 6
        (said,) = (one for one in found["outliers"] if "latency" not in one)
        assert said.startswith(f"{there[3].address} is slow to all others: ")

        there[3].shape(FAST)
        there[0].wire(there[1], SLOW)
        there[2].lose(there[3])
        found = measured(place, head, 1)
        check_rates(found, slow={(0, 1)})
        (said,) = (one for one in found["outliers"] if "latency" not in one)
        assert said.startswith(f"{there[0].address} ↔ {there[1].address}: ")
        (said,) = found["problems"]
        assert said.startswith(f"{there[2].address} ↔ {there[3].address}: no messages pass: ")
        (kept,) = (place.home / "hardware").iterdir()  # of the same cluster
        assert json.loads(kept.read_text())["measured"] == found["measured"]


def meeting(place: Place) -> list[psutil.Process]:
    return [one for one in place.processes() if "LinkProbe.meet" in drive.title(one)]


def test_a_probe_that_hangs_is_replaced(place: Place) -> None:
    with ray_heads.cluster(place, *[NODE] * 3) as head:
        doctor = place.start(*DOCTOR, head.address, "--json", "-")
        drive.wait_until("two meet", lambda: len(meeting(place)) == 2)
        meeting(place)[0].suspend()
        done = place.end(doctor)
        assert done.code == 1, done.out + done.err
        errors = [pair["error"] for pair in json.loads(done.out)["pairs"]]
        assert sorted(map(bool, errors)) == [False, False, True], errors
        check_no_probes(head)


def test_a_host_is_cut_while_it_is_measured(
    place: Place, network: tuple[str, list[Machine]]
) -> None:
    with started(place, network, 3) as head:
        doctor = place.start(*DOCTOR, head.address)
        drive.wait_until("two meet", lambda: meeting(place))
        cut = network[1][1]
        cut.cut()
        done = place.end(doctor)
        assert done.code == 1, done.out + done.err
        assert f"{cut.address}: the node is gone" in done.out
        row = next(line for line in done.out.splitlines() if line.startswith("1 "))
        assert row.split()[2:4] == ["–", "none"], done.out
        assert row.split()[4] != "none", f"the pair of the others was not measured\n{done.out}"
        assert 3 < float(row.split()[4]) < 6.3
        cut.mend()
        drive.wait_until("no probe is left", lambda: not meeting(place))
