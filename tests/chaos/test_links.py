"""``ringray doctor --cluster`` over machines whose links are shaped, or cut."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest

from cluster.network import Machine, payload
from tests.support import cables
from tests.support import place as drive
from tests.support.place import Place
from tests.support.ray_heads import Head

Hosts = tuple[Head, list[Machine]]

FAST, SLOW = "40mbit", "8mbit"  # so few that a busy machine keeps up
DOCTOR = ("doctor", "--cluster", "--address")


def measured(place: Place, head: Head, code: int) -> dict[str, Any]:
    """Returns the doctor's report; nothing of it is left."""
    done = place.run(*DOCTOR, head.address, "--json", "-")
    assert done.code == code, done.out + done.err
    drive.wait_until("no probe is left", lambda: not probes(place))
    report: dict[str, Any] = json.loads(done.out)
    return report


def probes(place: Place) -> list[psutil.Process]:
    return [process for process in place.processes() if "LinkProbe" in drive.title(process)]


def check_rates(report: dict[str, Any], slow: set[tuple[int, int]]) -> None:
    for pair in report["pairs"]:
        first, second = sorted(report["nodes"][node]["name"] for node in pair["nodes"])
        places = int(first.rpartition(".")[2]) - 2, int(second.rpartition(".")[2]) - 2
        rate = payload(SLOW if places in slow else FAST)
        assert pair["error"] or 0.4 * rate < pair["bandwidth"] < 1.3 * rate, (pair, places)


@pytest.mark.chaos
@pytest.mark.tc
@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_slow_hosts_and_slow_pairs_are_named(place: Place, hosts: Hosts) -> None:
    head, there = hosts
    for machine in there:
        machine.shape(FAST)
    there[3].shape(SLOW)
    report = measured(place, head, 0)
    check_rates(report, slow={(0, 3), (1, 3), (2, 3)})
    assert len(report["pairs"]) == 6
    (outlier,) = (pair for pair in report["outliers"] if "latency" not in pair)
    assert outlier.startswith(f"{there[3].address} is slow to all others: ")

    there[3].shape(FAST)
    cables.wire(there[0], there[1], SLOW)
    cables.lose(there[2], there[3])
    report = measured(place, head, 1)
    check_rates(report, slow={(0, 1)})
    (outlier,) = (pair for pair in report["outliers"] if "latency" not in pair)
    assert outlier.startswith(f"{there[0].address} ↔ {there[1].address}: ")
    (problem,) = report["problems"]
    assert problem.startswith(f"{there[2].address} ↔ {there[3].address}: no messages pass: ")
    (saved,) = (place.home / "hardware").iterdir()  # of the same cluster
    assert json.loads(saved.read_text())["measured"] == report["measured"]
