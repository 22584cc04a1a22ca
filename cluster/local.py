"""Runs a command on a Ray cluster that grows and shrinks on this machine, then takes it down.

    python cluster/local.py -- python -m ringray run experiments/autoscaling.yaml
    python cluster/local.py                 # until Ctrl-C; prints the variables for other shells
    python cluster/local.py --until-empty --log autoscaler.log -- COMMAND ...

The head has no CPUs; nodes are those of cluster/local-autoscaling.yaml. Everything listens on the
loopback alone, on free ports, with a token that only this process and its children know (or that of
RAY_AUTH_TOKEN). It prints the numbers of nodes and of waiting placement groups to stderr when they
change; its exit code is the command's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from ringray.lab.cluster import ray_private
from ringray.lab.cluster.capacity import HEAD

CONFIG = Path(__file__).with_name("local-autoscaling.yaml")
HOST = "127.0.0.1"
# Ray replaces the loopback's address by one that others can reach, unless this is 0.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
START_S = 300.0  # seconds for the head to answer
STOP_S = 10.0  # seconds for its processes to end by themselves
EMPTY_S = 120.0  # seconds for all nodes to end after their idle timeout
LOOK_S = 0.2  # seconds between two looks at the cluster
LAST_LOOK_S = 5.0  # seconds for a look to end; Ray waits a minute for a head that hangs
# A decision in the autoscaler's log.
DECISION = re.compile(r"(?P<time>[\d-]+ [\d:]+),\d+.* (?P<what>(Adding|Removing) \d+ node.*)$")


class Local:
    """The cluster: a head, and the nodes that its autoscaler starts."""

    def __init__(self, config: Path, dashboard: int | None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rr-"))  # short: sockets lie in it
        self.ray = self.folder / "r"  # Ray opens its own folder to every user of the machine
        self.address = f"{HOST}:{_free_port()}"
        self.token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
        self.config: dict[str, Any] = yaml.safe_load(config.read_text())
        self.config["provider"]["gcs_address"] = self.address
        self.idle_s = 60.0 * self.config["idle_timeout_minutes"]
        written = self.folder / "autoscaling.yaml"
        written.write_text(yaml.safe_dump(self.config))
        web = ["--include-dashboard=false"]
        if dashboard is not None:
            web = ["--include-dashboard=true", f"--dashboard-host={HOST}"]
            web.append(f"--dashboard-port={dashboard}")
        self.head = subprocess.Popen(
            [
                sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
                f"--port={self.address.rpartition(':')[2]}", f"--node-ip-address={HOST}",
                "--num-cpus=0", "--num-gpus=0", "--object-store-memory=200000000",
                f"--autoscaling-config={written}",
                f"--temp-dir={self.ray}", f"--ray-client-server-port={_free_port()}",
                "--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0",
                "--disable-usage-stats", *web,
            ],
            stdout=subprocess.DEVNULL, stderr=(self.folder / "head.log").open("w"),
            env=self._environment(), start_new_session=True,
        )  # fmt: skip

    def exports(self) -> dict[str, str]:
        """Returns the environment variables of the cluster's clients."""
        return access(self.address, self.token) | LOOPBACK

    def _environment(self) -> dict[str, str]:
        head = self.config["provider"]["head_node_id"]
        environment = os.environ | self.exports()
        del environment["RAY_ADDRESS"]  # which is for clients
        path = [str(CONFIG.parent), *filter(None, [environment.get("PYTHONPATH")])]
        # Jobs run `python` on the head: this puts the cluster's own first.
        commands = [str(Path(sys.executable).parent), *filter(None, [environment.get("PATH")])]
        return environment | {
            "PATH": os.pathsep.join(commands),
            "PYTHONPATH": os.pathsep.join(path),
            # The provider makes up the ids of nodes, including the head's.
            "RAY_FAKE_CLUSTER": "1",
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head,
            "RAY_CLOUD_INSTANCE_ID": head,
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": os.environ.get("AUTOSCALER_UPDATE_INTERVAL_S", "1"),
            "AUTOSCALER_METRIC_PORT": "0",
        }

    def wait_ready(self) -> None:
        """Waits until the head answers; SystemExit if it does not."""
        until = time.monotonic() + START_S
        while look(self.address) is None:
            if self.head.poll() is not None or time.monotonic() > until:
                said = (self.folder / "head.log").read_text()[-2000:]
                raise SystemExit(f"the head did not start:\n{said}")
            time.sleep(LOOK_S)

    def decisions(self) -> list[str]:
        """Returns what the autoscaler added and removed, with the times."""
        lines = (
            line
            for path in self.ray.glob("session_2*/logs/monitor.*")
            for line in path.read_text(errors="replace").splitlines()
        )
        found = {f"{one['time']} {one['what']}" for line in lines if (one := DECISION.search(line))}
        return sorted(found)

    def close(self) -> None:
        """Ends the head, the autoscaler and its nodes, and removes their files."""
        end([self.head])
        shutil.rmtree(self.folder, ignore_errors=True)


class Watch(threading.Thread):
    """A thread that prints the numbers of nodes and waiting placement groups when they change."""

    def __init__(self, look: Callable[[], tuple[int, int] | None]) -> None:
        super().__init__(daemon=True)
        self._look, self._began = look, time.monotonic()
        self._ended = threading.Event()
        self.nodes, self.waiting = 0, 0

    def run(self) -> None:
        while not self._ended.wait(LOOK_S):
            now = self._look()
            if now is not None and now != (self.nodes, self.waiting):
                self.nodes, self.waiting = now
                self.say(f"{self.nodes} nodes, {self.waiting} placement groups waiting")

    def say(self, text: str) -> None:
        """Prints a line with the seconds since the start."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def wait_empty(self, patience: float) -> int:
        """Waits until all nodes have ended; returns 1 if some live after ``patience`` seconds."""
        until = time.monotonic() + patience
        while self.nodes and time.monotonic() < until:
            time.sleep(LOOK_S)
        return 1 if self.nodes else 0

    def stop(self) -> None:
        """Ends the thread; one that waits for a head that hangs is left behind."""
        self._ended.set()
        if self.is_alive():
            self.join(LAST_LOOK_S)


def access(address: str, token: str) -> dict[str, str]:
    """Returns the environment variables of a client of the Ray at ``address``."""
    return {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def look(address: str) -> tuple[int, int] | None:
    """Returns the numbers of live nodes besides the head and of waiting placement groups; None if
    the head does not answer."""
    reply = ray_private.cluster_status(address, 2) if _listens(address) else None
    if reply is None:
        return None
    state = reply.cluster_resource_state
    alive = [node for node in state.node_states if node.status != ray_private.DEAD]
    heads = sum(HEAD in node.total_resources for node in alive)
    waiting = len(state.pending_gang_resource_requests)
    return (len(alive) - heads, waiting) if heads else None


def end(nodes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends nodes and all their processes."""
    family: list[psutil.Process] = []
    for node in nodes:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(node.pid)
            family += [*process.children(recursive=True), process]
        if node.poll() is None:
            node.terminate()
    # Nodes are children of the autoscaler and outlive it.
    for process in psutil.wait_procs(family, timeout=1)[1]:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(family, timeout=STOP_S)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    for node in nodes:
        node.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _listens(address: str) -> bool:
    """Returns whether a server listens; Ray itself tries for half a minute."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def main(argv: list[str]) -> int:
    """Runs the command line; returns the exit code of the command."""
    parser = argparse.ArgumentParser(
        prog="python cluster/local.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--config", type=Path, default=CONFIG, help="the autoscaler's (YAML)")
    parser.add_argument("--dashboard-port", type=int, help="port of Ray's dashboard, for jobs")
    parser.add_argument(
        "--until-empty", action="store_true", help="wait until all nodes have ended"
    )
    parser.add_argument("--log", type=Path, help="write the autoscaler's decisions to this file")
    parser.add_argument("command", nargs="*", help="after --; without one the cluster stays up")
    given = parser.parse_args(argv)
    # SIGTERM ends it as Ctrl-C does, with its cluster.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cluster = Local(given.config, given.dashboard_port)
    os.environ.update(cluster.exports())
    watch = Watch(partial(look, cluster.address))
    try:
        cluster.wait_ready()
        watch.say(f"head at {cluster.address}")
        watch.start()
        code = serve(given.command, cluster.exports(), cluster.head.wait)
        if given.command:
            watch.say(f"the command ended with {code}")
        if given.until_empty and code != 130:
            code = code or watch.wait_empty(cluster.idle_s + EMPTY_S)
        if given.log is not None:
            given.log.write_text("\n".join(cluster.decisions()) + "\n")
        return code
    except KeyboardInterrupt:
        return 130
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        watch.stop()
        cluster.close()


def serve(
    command: Sequence[str], exports: Mapping[str, str], wait: Callable[[], int], *inside: str
) -> int:
    """Returns the exit code of ``command``, which is told of Ctrl-C and has the words ``inside``
    before it; without one prints the variables of clients, and returns what ``wait`` does."""
    if not command:
        for name, value in exports.items():
            print(f"export {name}={value}", flush=True)
        if inside:
            print(f"commands: {' '.join(inside)} COMMAND ...", flush=True)
        return wait()
    client = subprocess.Popen([*inside, *command], env=dict(os.environ))
    try:
        return client.wait()
    except KeyboardInterrupt:  # the command got the signal too
        client.send_signal(signal.SIGINT) if client.poll() is None else None
        return client.wait()


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Python's own end would wait for a call of Ray to a head that hangs.
    os._exit(exit_code)
