"""Runs a command on a Ray cluster of several hosts on this machine, then takes it down.

    python cluster/multihost.py --rate 200mbit -- python -m ringray run experiments/quickstart.yaml
    python cluster/multihost.py --hosts 3 --labels ringray.io/rack=a --labels ringray.io/rack=b
                                            # until Ctrl-C; prints how to run commands there

Each host is a network namespace with an address and a cable of its own. A head without CPUs has
one more, in which the command runs; nothing listens anywhere else, and a token that only this
process and its children know (or that of RAY_AUTH_TOKEN) guards it. The CPUs of a host are a
declaration: all share those of this machine. `ip link set NAME down` pulls the cable of a host,
`up` plugs it in again; names are printed. Needs the right to make namespaces (root), `ip` and, for
--rate, `tc`. Its exit code is the command's; 2 if there can be no such cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cluster import local
from cluster.network import PREFIX, Machine, machines, payload

PORT = 6379  # of the head; each host has all ports for itself
START_S = 300.0  # seconds for all hosts to be there
SURE_S = 20.0  # seconds within which a host ends only because it cannot start
STORE_BYTES = 100_000_000  # of objects, on each host


class Hosts:
    """The cluster: a head and its hosts, each on a machine of its own."""

    def __init__(self, head: Machine, hosts: Sequence[Machine], cpus: int, labels: list[str]):
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))  # short: for sockets
        self.address = f"{head.address}:{PORT}"
        os.environ |= self.exports()
        first = partial(
            self._start, head, "--head", f"--port={PORT}", "--num-cpus=0",
            "--include-dashboard=false",
        )  # fmt: skip
        self._starts: list[Callable[[], subprocess.Popen[bytes]]] = [first]
        for at, host in enumerate(hosts):
            words = [f"--address={self.address}", f"--num-cpus={cpus}"]
            words += [f"--labels={labels[at % len(labels)]}"] if labels else []
            self._starts.append(partial(self._start, host, *words))
        self._nodes: list[subprocess.Popen[bytes]] = []

    def exports(self) -> dict[str, str]:
        """Returns the environment variables of the cluster's clients."""
        token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
        return local.access(self.address, token)

    def _start(self, on: Machine, *arguments: str) -> subprocess.Popen[bytes]:
        # Of two nodes in one folder, the later would empty the working directory of the first.
        folder = self.folder / on.name.rpartition("n")[2]
        # Linux shares cores between sessions first: one for all, or a ring over hosts gets more.
        environment = {name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"}
        return subprocess.Popen(
            [
                *on.inside, sys.executable, "-m", "ray.scripts.scripts", "start", *arguments,
                f"--node-ip-address={on.address}", f"--temp-dir={folder}", "--num-gpus=0",
                f"--object-store-memory={STORE_BYTES}", "--min-worker-port=0",
                "--max-worker-port=0", "--disable-usage-stats", "--block",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=(self.folder / "ray.log").open("a"), env=environment, process_group=0,
        )  # fmt: skip

    def start(self) -> None:
        """Starts the head and one host after the other; OSError if one does not come."""
        until = time.monotonic() + START_S
        for at, start in enumerate(self._starts):
            self._nodes.append(start())
            began = time.monotonic()
            while (seen := local.look(self.address)) is None or seen[0] < at:
                now, ended = time.monotonic(), self._nodes[-1].poll() is not None
                early = ended and now < began + SURE_S
                if self._nodes[0].poll() is not None or early or now > until:
                    said = (self.folder / "ray.log").read_text()[-2000:]
                    raise OSError(f"the hosts did not start:\n{said}")
                if ended:  # Ray gives it 30 s, which are too few on a busy machine
                    self._nodes[-1], began = start(), now
                time.sleep(local.LOOK_S)

    def wait(self) -> int:
        """Waits for the end of the head."""
        return self._nodes[0].wait()

    def close(self) -> None:
        """Ends all hosts and removes their files."""
        local.end(self._nodes[::-1])
        shutil.rmtree(self.folder, ignore_errors=True)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python cluster/multihost.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--hosts", type=int, default=4, help="1 to 64, the head not counted")
    parser.add_argument("--cpus", type=int, default=2, help="of each host; at least 1")
    parser.add_argument("--rate", help="of what a host sends, and of what it receives: 200mbit")
    parser.add_argument(
        "--labels", action="append", default=[], metavar="NAME=VALUE,...",
        help="of Ray's nodes: of the first host, the next, ..., and again from the first",
    )  # fmt: skip
    parser.add_argument("command", nargs="*", help="after --; without one the cluster stays up")
    given = parser.parse_args(argv)
    for name, most in (("hosts", 64), ("cpus", 1024)):
        if not 1 <= getattr(given, name) <= most:
            parser.error(f"--{name}: got {getattr(given, name)}, expected 1 to {most}")
    for one in given.labels:
        if not all(name and value for name, _, value in (x.partition("=") for x in one.split(","))):
            parser.error(f"--labels: got {one!r}, expected NAME=VALUE,...")
    try:
        payload(given.rate or "1mbit")
    except ValueError as error:
        parser.error(f"--rate: {error}")
    return given


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit code of the command."""
    given = _arguments(argv)
    # SIGTERM ends it as Ctrl-C does, with its cluster.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with machines(given.hosts + 1) as (_, (head, *hosts)):
            for host in hosts if given.rate else []:
                host.shape(given.rate)
            cluster = Hosts(head, hosts, given.cpus, given.labels)
            try:
                cluster.start()
                for host in hosts:
                    print(f"{host.address}: {host.name}", file=sys.stderr, flush=True)
                return local.serve(given.command, cluster.exports(), cluster.wait, *head.inside)
            finally:
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.SIG_IGN)
                with contextlib.suppress(OSError):
                    cluster.close()
    except OSError as error:
        print(f"multihost: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
