"""A Ray cluster of a test's own: nodes on this machine with private ports, a dashboard and a token.

Nothing of it is shared with another Ray: ports are free ones, folders lie in the test's place, and
whoever comes without the token is refused. Its nodes end when the test does.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cluster.network import Machine
from tests.support import place as drive
from tests.support.place import Place

ADDRESS = "127.0.0.1"
GRACE_S = 20.0


@dataclass
class Head:
    """A running cluster: ``url`` is its dashboard's, ``address`` that of its GCS, ``host`` where
    nodes find its machine."""

    place: Place
    host: str
    port: int
    dashboard: int
    token: str
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.dashboard}"

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(
        self, *arguments: str, machine: Machine | None = None, **variables: str
    ) -> subprocess.Popen[bytes]:
        """``ray start ARGUMENTS``: a node whose environment knows no ringray but through
        ``variables``; on this machine if not on another."""
        environment = self.place.environment
        del environment["PYTHONPATH"]
        environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **variables}
        ports = free_ports(4)
        log = self.place.ray / f"node-{len(self.nodes)}.log"  # home may be a full disk
        with log.open("wb") as file:
            self.nodes.append(
                subprocess.Popen(
                    [
                        *(machine.inside if machine else ()),
                        sys.executable, "-m", "ray.scripts.scripts", "start", *arguments,
                        f"--node-ip-address={machine.address if machine else self.host}",
                        "--num-gpus=0", "--block",
                        "--disable-usage-stats", "--object-store-memory=100000000",
                        f"--dashboard-agent-listen-port={ports[0]}",
                        f"--dashboard-agent-grpc-port={ports[1]}",
                        f"--runtime-env-agent-port={ports[2]}",
                        f"--metrics-export-port={ports[3]}",
                        "--min-worker-port=0", "--max-worker-port=0",
                    ],
                    stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                    cwd=self.place.home, env=environment, start_new_session=True,
                )
            )  # fmt: skip
        return self.nodes[-1]

    def ask(self, path: str) -> Any:
        """Returns the dashboard's answer."""
        request = urllib.request.Request(
            f"{self.url}{path}", headers={"Authorization": f"Bearer {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def alive(self) -> int:
        """Returns the number of nodes; 0 while the dashboard does not answer."""
        with suppress(OSError, ValueError, KeyError):
            found = self.ask("/api/v0/nodes")["data"]["result"]["result"]
            return sum(node["state"] == "ALIVE" for node in found)
        return 0

    def held(self) -> dict[str, int]:
        """Live rank actors and placement groups of any job."""
        actors = self.ask("/api/v0/actors?limit=1000")["data"]["result"]["result"]
        groups = self.ask("/api/v0/placement_groups?limit=1000")["data"]["result"]["result"]
        return {
            "ranks": sum(a["class_name"] == "Rank" and a["state"] != "DEAD" for a in actors),
            "groups": sum(group["state"] != "REMOVED" for group in groups),
        }

    def check_nothing_is_held(self) -> None:
        """Fails when a ring outlives its job."""
        drive.wait_until("nothing is held", lambda: not any(self.held().values()))

    def end(self) -> None:
        """Ends the nodes, workers before their head; by pid."""
        for node in reversed(self.nodes):
            node.send_signal(signal.SIGTERM)
        for node in self.nodes:
            with suppress(subprocess.TimeoutExpired):
                node.wait(GRACE_S)


@contextmanager
def cluster(
    place: Place,
    *nodes: dict[str, str],
    cpus: int = 0,
    host: str = ADDRESS,
    machines: Sequence[Machine] = (),
    **variables: str,
) -> Iterator[Head]:
    """A head with ``cpus`` CPUs and ``variables``, and one node of 4 CPUs for each environment in
    ``nodes``: each on one of ``machines``, which see the head as ``host``, if there are any."""
    port, dashboard, client = free_ports(3)
    head = Head(place, host, port, dashboard, secrets.token_hex(16))
    place.variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": head.token}
    try:
        head.start(
            "--head", f"--port={port}", f"--num-cpus={cpus}", f"--temp-dir={place.ray}",
            f"--dashboard-host={ADDRESS}", f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={client}", **variables,
        )  # fmt: skip
        drive.wait_until("the head answers", lambda: head.alive() == 1)
        waited = []
        for variables, machine in zip_longest(nodes, machines):
            # Of two nodes in one folder, the later would empty the working directory of the first.
            folder = place.ray / str(len(head.nodes))
            start = partial(
                head.start, f"--address={head.address}", "--num-cpus=4", f"--temp-dir={folder}",
                machine=machine, **variables,
            )  # fmt: skip
            waited.append((start(), start))

        def all_there() -> bool:
            """Ray gives a node up after 30 s, which a busy machine may need: it gets another."""
            for position, (node, start) in enumerate(waited):
                if node.poll() is not None:
                    waited[position] = (start(), start)
            return head.alive() == 1 + len(nodes)

        drive.wait_until("all nodes are there", all_there)
        yield head
    finally:
        head.end()


def free_ports(count: int) -> list[int]:
    """Returns unused ports, none of those that the system deals to whoever asks for any: such a
    one may be taken before its owner opens it."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(12_000, 32_000)  # Linux deals from 32768, others from 49152
        with suppress(OSError), socket.create_server((ADDRESS, port)):  # refused when taken
            found.append(port)
    return found
