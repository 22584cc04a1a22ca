"""A cluster that grows from nothing for the rings of a sweep, and shrinks: Ray's own autoscaler."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml

from tests.chaos.struck import ended, faults, raylet_of
from tests.support import place as drive
from tests.support.place import PATIENCE, REPOSITORY, Place, tiny, wait_until

pytestmark = pytest.mark.chaos

IDLE_S = 5.0
CONFIG = REPOSITORY / "cluster" / "local-autoscaling.yaml"
SEEN = re.compile(r"(\d+) nodes, (\d+) placement groups waiting")


@dataclass
class Growing(Place):
    """A place whose commands run on a cluster of one head and its autoscaler."""

    exports: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | self.exports

    def _seen(self) -> list[tuple[int, int]]:
        """Nodes and waiting placement groups over time, as `cluster/local.py` tells of them."""
        log = (self.home / "cluster.log").read_text()
        return [(0, 0), *((int(n), int(g)) for n, g in SEEN.findall(log))]

    def nodes(self) -> int:
        return self._seen()[-1][0]

    def waiting(self) -> int:
        return self._seen()[-1][1]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Growing]:
    home = tmp_path_factory.mktemp("home")
    config = yaml.safe_load(CONFIG.read_text()) | {"idle_timeout_minutes": IDLE_S / 60}
    path = home / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    for plain in drive.place(home):
        made = Growing(plain.home, plain.ray, started=plain.started)
        cluster = subprocess.Popen(
            [sys.executable, str(REPOSITORY / "cluster" / "local.py"), "--config", str(path)],
            stdout=subprocess.PIPE, stderr=(home / "cluster.log").open("w"), text=True,
            cwd=home, env=made.environment,
        )  # fmt: skip
        try:
            assert cluster.stdout is not None
            for _ in range(4):
                line = cluster.stdout.readline().removeprefix("export ")
                name, _, value = line.partition("=")
                made.exports[name] = value.strip()
            assert {"RAY_ADDRESS", "RAY_AUTH_TOKEN"} <= set(made.exports), made.exports
            yield made
        finally:
            cluster.terminate()
            cluster.wait(PATIENCE)
        assert cluster.returncode == 130
        # Agents of nodes that were given back outlive them for up to a minute.
        made.check_nothing_is_left()


def test_a_sweep_grows_the_cluster_and_lets_it_shrink(place: Growing) -> None:
    text = tiny("grows", size="[2, 4]", replicas=3).replace("threads: 1", "threads: 1, "
        "placement: strict-spread")  # fmt: skip
    assert place.nodes() == 0
    sweep = place.start("run", place.spec(text))
    seen = {0}

    def ended() -> bool:
        seen.add(place.nodes())
        return sweep.poll() is not None

    wait_until("the sweep ends", ended)
    done = place.end(sweep)
    assert done.code == 0, done.out + done.err
    assert {row.status for row in place.trials("grows")} == {"ok"}
    assert "waiting for nodes: " in done.out
    # The ring of 2 did not ask for the nodes of the ring of 4.
    assert {0, 2, 4} <= seen
    assert place.waiting() == 0
    wait_until("all nodes are gone", lambda: place.nodes() == 0)


@pytest.mark.parametrize(
    ("ring", "says"),
    [
        (
            "size: 5",
            "needs 5 CPUs, the cluster can offer rings of up to 4: 4 × gpu (1 CPU, 1 GPU)",
        ),
        ("size: 2, placement: strict-pack", "on one node, the cluster can offer rings of up to 1"),
    ],
)
def test_a_ring_that_never_fits_is_refused_before_anything_starts(
    place: Growing, ring: str, says: str
) -> None:
    spec = place.spec(tiny("never").replace("size: 2", ring))
    done = place.run("run", spec)
    assert done.code == 2, done.out + done.err
    assert says in done.err
    assert f"{spec}:4: ring.size" in done.err
    assert "starting" not in done.out  # no ring asked for a place
    assert (place.nodes(), place.waiting(), place.ranks()) == (0, 0, [])


def preempt(place: Growing, raylet: psutil.Process) -> None:
    """Ends a node as its owner does: it says so, and does it a second later."""
    node = raylet.environ()["RAY_OVERRIDE_NODE_ID_FOR_TESTING"]
    subprocess.run(
        [
            str(Path(sys.executable).with_name("ray")), "drain-node", f"--node-id={node}",
            f"--address={place.exports['RAY_ADDRESS']}", "--deadline-remaining-seconds=1",
            "--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot",
        ],
        check=True, capture_output=True, env=place.environment,
    )  # fmt: skip
    time.sleep(1.1)
    raylet.kill()


def two_rings(place: Growing, lost: set[int]) -> list[psutil.Process]:
    """The ranks of two rings without those that a lost node leaves, while there are so many."""
    found = []
    for rank in place.ranks():
        with suppress(AssertionError, psutil.Error):
            if raylet_of(rank).pid not in lost:
                found.append(rank)
    return found if len(found) == 4 else []


@pytest.mark.exhaustive
def test_rings_side_by_side_outlive_two_preempted_nodes(place: Growing) -> None:
    """Both ask for their nodes at the same time, and no loss of a node is an attempt."""
    text = tiny("spot", size=2, seq_len=512, replicas=24, repeats=1000, retries=0, timeout="600s")
    text = text.replace("threads: 1", "threads: 1, placement: strict-spread, concurrent: 2")
    sweep = place.start("run", place.spec(text), "--no-tracking")
    lost: set[int] = set()
    for _ in range(2):
        wait_until("a ring measures", lambda: ended(place, "spot"))
        ranks = wait_until("two rings", lambda: two_rings(place, lost))
        # The oldest is of a ring that measures; another may be of one that begins.
        raylet = raylet_of(min(ranks, key=lambda rank: rank.create_time()))
        lost.add(raylet.pid)
        preempt(place, raylet)
        wait_until("it is gone", lambda r=raylet: not r.is_running())
    done = place.end(sweep)
    assert done.code == 0, done.out + done.err
    rows = place.trials("spot")
    assert {row.status for row in rows} == {"ok"}
    met = [fault["kind"] for row in rows for fault in faults(row)]
    assert met == ["node-preempted"] * 2, met
    assert done.out.count("waiting for nodes: ") > 0
    wait_until("all nodes are gone", lambda: place.nodes() == 0)
