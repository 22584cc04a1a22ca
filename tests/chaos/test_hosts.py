"""Sweeps over several hosts with shaped links, whose cables are pulled and plugged in again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.network import Machine, machines, payload
from ringray.lab.ring.order import crossings
from ringray.lab.trial.config import shuffled
from tests.chaos.conftest import RATE
from tests.chaos.struck import NODE, REPLICAS, begun, faults, recovered
from tests.support import cables
from tests.support import place as drive
from tests.support.place import REPOSITORY, Place, tiny
from tests.support.ray_heads import Head

Hosts = tuple[Head, list[Machine]]

COMMAND = [sys.executable, str(REPOSITORY / "cluster" / "multihost.py")]
MAKER = """\
import subprocess, sys, time
from cluster.network import machines
with machines(1) as (_, (one,)):
    inside = subprocess.Popen([*one.inside, "sleep", "600"], stdout=subprocess.DEVNULL)
    print(one.name, inside.pid, flush=True)
    time.sleep(600)
"""


def names() -> set[str]:
    """Those of all bridges, cables and namespaces."""
    words = (["ip", "-br", "link"], ["ip", "netns", "list"])
    text = "".join(subprocess.run(one, capture_output=True, text=True).stdout for one in words)
    return {line.split()[0].partition("@")[0] for line in text.splitlines() if line}


def apart(name: str, size: int, **changes: Any) -> str:
    """A sweep whose ranks lie on hosts of their own."""
    text = tiny(name, size=size, repeats=60, **changes)
    return text.replace("threads: 1", "threads: 1, concurrent: null, placement: strict-spread")


@pytest.mark.chaos
@pytest.mark.tc
def test_a_sweep_over_shaped_hosts(place: Place) -> None:
    """Two ranks on each of three: the command starts them, and leaves nothing behind."""
    text = tiny("hosts", size=6, seq_len=768, repeats=3, timeout="300s").replace(
        "threads: 1", "threads: 1, placement: spread, order: [topology, shuffled]"
    )
    text = text.replace("heads: 2, head_dim: 16", "heads: 8, head_dim: 64, causal: false")
    sweep = [sys.executable, "-m", "ringray", "run", str(place.spec(text)), "--no-tracking"]
    done = subprocess.run(
        [*COMMAND, "--hosts=3", "--cpus=2", f"--rate={RATE}", "--", *sweep],
        env=place.environment, cwd=place.home, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    straight, mixed = place.trials("hosts")
    assert {straight.status, mixed.status} == {"ok"}
    hosts = [str(seat // 2) for seat in shuffled(6, mixed.config["seed"])]
    crossing = crossings(hosts)
    assert (straight.environment or {})["ring"] == {"nodes": 3, "crossings": 3}
    assert (mixed.environment or {})["ring"] == {"nodes": 3, "crossings": crossing}
    # In order each host sends one of six chunks at each of five steps, else one of them sends two.
    sent = Counter(one for one, after in pairwise([*hosts, hosts[0]]) if one != after)
    assert max(sent.values()) == 2
    least_ms = 800 * straight.metrics["sent_bytes"] / 6 / payload(RATE)
    assert straight.metrics["median_ms"] > least_ms
    assert mixed.metrics["median_ms"] > 2 * least_ms
    made = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("10.")]
    assert len(made) == 3
    assert not names() & {*made, made[0].rpartition("n")[0]}
    place.check_nothing_is_left()


@pytest.mark.chaos
@pytest.mark.tc
def test_hosts_of_a_killed_command_are_removed() -> None:
    """Those of a living one stay."""
    started = [
        subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True,
                         cwd=REPOSITORY)
        for _ in range(2)
    ]  # fmt: skip
    try:
        (dead, inside), (alive, beside) = (
            one.stdout.readline().split() for one in started if one.stdout is not None
        )
        started[0].kill()
        started[0].wait()
        assert {dead, alive} <= names()
        with machines(1):
            left = names()
            assert alive in left
            assert not {dead, dead.rpartition("n")[0]} & left
            drive.wait_until("what ran there ends", lambda: not running(int(inside)))
            assert running(int(beside))
    finally:
        for one in started:
            one.send_signal(signal.SIGINT)
            one.wait()
    assert not {dead, alive} & names()
    os.kill(int(beside), signal.SIGKILL)


def running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "fast"], "--rate: got 'fast', expected a rate such as 200mbit"),
        (["--hosts", "0"], "--hosts: got 0, expected 1 to 64"),
        ([], "multihost: there is no command `ip`"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path)}
    words = [*COMMAND, *options, "--", "true"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.exhaustive
@pytest.mark.tc
@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_a_cable_is_pulled(place: Place, hosts: Hosts) -> None:
    """Nothing is refused and nobody is told; the next ring is on machines that answer."""
    head, there = hosts
    driver = begun(place, apart("cable", 2, replicas=REPLICAS), "--address", head.address)
    cut = next(node for node in there if cables.runs(node, place.ranks()[1].pid))
    _, fault = recovered(place, driver, "cable", lambda: cables.cut(cut))
    assert fault["kind"] == "node-lost", fault
    assert fault["node"].startswith(cut.address)
    cables.mend(cut)
    head.check_nothing_is_held()
    drive.wait_until("no rank is left", lambda: not place.ranks())


@pytest.mark.exhaustive
@pytest.mark.tc
@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_a_cable_is_pulled_while_ranks_start(place: Place, hosts: Hosts) -> None:
    """Which takes them a while, in which they answer nothing."""
    head, there = hosts
    text = apart("early", 2, replicas=REPLICAS)
    driver = place.start("run", place.spec(text), "--no-tracking", "--address", head.address)
    victim = drive.wait_until("a rank starts", place.ranks)[0]
    assert "__init__" in drive.title(victim), "it has started already"
    cut = next(node for node in there if cables.runs(node, victim.pid))
    since = time.time()
    cables.cut(cut)
    done = place.end(driver)
    assert done.code == 0, done.out + done.err
    rows = place.trials("early")
    assert {row.status for row in rows} == {"ok"}
    (fault,) = [fault for row in rows for fault in faults(row)]
    # Noticed by the driver itself: Ray takes more than a minute.
    assert (fault["kind"], fault["hop"]) == ("node-lost", "its start"), fault
    assert fault["node"].startswith(cut.address)
    print(f"first trial after {min(row.ended or 0 for row in rows) - since:.1f} s")
    cables.mend(cut)
    head.check_nothing_is_held()


@pytest.mark.exhaustive
@pytest.mark.tc
@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_a_host_stays_away(place: Place, hosts: Hosts) -> None:
    """The sweep ends and names what is missing; with another host it goes on where it was."""
    head, there = hosts
    text = apart("away", 3, replicas=8).replace("retries: 2", "retries: 2, place_timeout: 10s")
    driver = begun(place, text, "--address", head.address)
    before = {row.key: row.metrics for row in place.trials("away") if row.status == "ok"}
    cables.cut(there[2])
    done = place.end(driver)
    assert done.code == 2, done.out + done.err
    assert "no place for a ring of 3 after 10 s (limits.place_timeout)" in done.err
    cables.mend(there[2])
    head.start(
        f"--address={head.address}", "--num-cpus=4", f"--temp-dir={place.ray / 'again'}",
        machine=there[2], **NODE,
    )  # fmt: skip
    again = place.run("resume", "away", "--no-tracking", "--address", head.address)
    assert again.code == 0, again.out + again.err
    rows = place.trials("away")
    assert [row.status for row in rows] == ["ok"] * 8
    assert before.items() <= {row.key: row.metrics for row in rows}.items(), "measured again"
    head.check_nothing_is_held()
