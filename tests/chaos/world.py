"""The victims of the campaign: a cluster of several nodes, cables, a tracking server, a disk."""

from __future__ import annotations

import random
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cluster import network
from cluster.network import Machine
from ringray.base.errors import UserError
from ringray.lab.store.store import Store
from tests.chaos.beside import Beside, first_runs, second_user, training
from tests.chaos.readers import READERS, Reader
from tests.support import cables, ray_heads, tracking_store
from tests.support import place as drive
from tests.support.fault_proxy import Proxy
from tests.support.place import Place
from tests.support.ray_heads import Head
from tests.support.tracking_servers import Server, sqlite_server

DISK_MIB = 64
BACK_S = 15.0  # after which a lost node is replaced, and a cable plugged in
NODES = ("node0", "node1", "node2")
AGENTS = ("ray::RuntimeEnvAgent", "ray::DashboardAgent")
DRIVERS = ("-m ringray run", "-m ringray resume")
TRACKER = "ringray.lab.tracking.process"
HEALTH = {  # how soon Ray believes that a node is gone
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
}


@dataclass
class World:
    """``disk``: whether the home is on a disk of its own, which can be filled; ``machines``: what
    each node runs on, with a cable of its own. Not every machine lets its users have them."""

    place: Place
    head: Head
    server: Server
    proxy: Proxy
    disk: bool
    machines: dict[str, Machine]
    nodes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    absent: dict[str, float] = field(default_factory=dict)  # nodes, and when that was seen
    cut: dict[str, float] = field(default_factory=dict)  # those without a cable, and since when
    spoilt: set[str] = field(default_factory=set)  # keys of trials whose rows were damaged
    slow: dict[psutil.Process, float] = field(default_factory=dict)  # stopped, and until when
    beside: list[Beside] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)

    def fill_disk(self) -> None:
        """Until nothing more fits."""
        with suppress(OSError), (self.place.home / "ballast").open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free_disk(self) -> None:
        (self.place.home / "ballast").unlink(missing_ok=True)

    @property
    def disk_full(self) -> bool:
        return (self.place.home / "ballast").exists()

    def raylet(self, name: str) -> psutil.Process | None:
        """The live raylet of a node."""
        node = self.nodes.get(name)
        if node is None or node.poll() is not None:
            return None
        with suppress(psutil.Error):
            for process in psutil.Process(node.pid).children(recursive=True):
                if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None

    def agents(self) -> list[psutil.Process]:
        """The agents that Ray keeps beside the raylets of nodes."""
        found = []
        for raylet in filter(None, map(self.raylet, NODES)):
            with suppress(psutil.Error):
                found += [
                    one
                    for one in raylet.children(recursive=True)
                    if drive.title(one).startswith(AGENTS)
                ]
        return found

    def local_agents(self) -> list[psutil.Process]:
        """Those of the Rays that sweeps beside this one have started for themselves."""
        there = [process for one in self.beside for process in one.place.processes()]
        return [process for process in there if drive.title(process).startswith(AGENTS)]

    def slow_down(self, agent: psutil.Process, seconds: float) -> None:
        """Stops an agent, which goes on later."""
        agent.suspend()
        self.slow[agent] = time.monotonic() + seconds

    def driver_parts(self, *titles: str) -> list[psutil.Process]:
        """Live processes of the place whose command line has one of ``titles`` in it."""
        return [
            process
            for process in self.place.processes()
            if any(title in drive.title(process) for title in titles)
        ]

    def spoil_row(self, draw: random.Random) -> bool:
        """Destroys what is recorded of a trial of the sweep that was begun last, as a dying disk
        does."""
        path = self.place.home / "store.db"
        if not path.exists() or path.stat().st_size == 0:
            return False
        with suppress(sqlite3.Error), closing(sqlite3.connect(path, timeout=2.0)) as db, db:
            last = "(SELECT digest FROM sweeps ORDER BY turn DESC LIMIT 1)"
            ended = f"FROM trials WHERE digest = {last} AND ended IS NOT NULL ORDER BY idx"
            keys = [key for (key,) in db.execute(f"SELECT key {ended}")]
            if keys:
                key = draw.choice(keys)
                db.execute(
                    f"UPDATE trials SET metrics = '{{' WHERE digest = {last} AND key = ?", (key,)
                )
                self.spoilt.add(key)
                db.commit()
                return True
        return False

    def cut_cable(self, name: str) -> None:
        cables.cut(self.machines[name])
        self.cut[name] = time.monotonic()

    def tend(self) -> None:
        """Brings back nodes and cables that were away for long enough, as an owner would."""
        now = time.monotonic()
        for name in [name for name, since in self.cut.items() if now - since > BACK_S]:
            self._plug_in(name)
        for agent in [agent for agent, until in self.slow.items() if now > until]:
            self._go_on(agent)
        for name in NODES:
            if self.raylet(name) is not None:
                self.absent.pop(name, None)
            elif now - self.absent.setdefault(name, now) > BACK_S:
                self._start(name)
                self.absent[name] = now

    def _plug_in(self, name: str) -> None:
        cables.mend(self.machines[name])
        del self.cut[name]

    def _go_on(self, agent: psutil.Process) -> None:
        del self.slow[agent]
        _resume(agent)

    def mend(self) -> None:
        """Repairs everything that is broken: disk, agents, cables, server, nodes."""
        self.free_disk()
        for agent in list(self.slow):
            self._go_on(agent)
        self.proxy.fail(None)
        for name in list(self.cut):
            self._plug_in(name)
        self.server.go_on()
        if not self.server.running:
            self.server.start()
        drive.wait_until("all nodes are there", self._whole)

    def _whole(self) -> bool:
        for name in NODES:
            if self.raylet(name) is None:
                self._start(name)
                drive.wait_until(f"{name} starts", lambda name=name: self.raylet(name) is not None)
        return self.head.alive() == 1 + len(NODES)

    def _start(self, name: str) -> None:
        old = self.nodes.pop(name, None)
        if old is not None:
            end(old)
        # Of two nodes in one folder, the later would empty the working directory of the first.
        folder = self.place.ray / f"{name}-{time.monotonic_ns() % 10**6}"
        self.nodes[name] = self.head.start(
            f"--address={self.head.address}", "--num-cpus=2", f"--temp-dir={folder}",
            machine=self.machines.get(name), **variables(self.place),
        )  # fmt: skip

    def sweep_beside(self, spec: Path) -> None:
        """Begins the same sweep for another user of the cluster and the server."""
        home = self.place.home.parent / f"user{len(self.beside)}-{spec.stem}"
        self.beside.append(second_user(self.place, home, spec, self.server.uri))
        self.beside[-1].begin()

    def first_runs(self, draw: random.Random) -> None:
        """Begins the first two runs of a user who has no home yet, on Rays of their own."""
        number = time.monotonic_ns() % 10**6
        home = self.place.home.parent / f"first-{number}"
        self.beside.append(first_runs(home, self.place.ray / f"f{number}", draw))

    def train(self, draw: random.Random) -> None:
        """Begins a training of another user on a Ray of its own, which will be struck."""
        number = time.monotonic_ns() % 10**6
        home = self.place.home.parent / f"trains-{number}"
        self.beside.append(training(home, self.place.ray / f"t{number}", draw))

    def read(self, sweep: str, draw: random.Random) -> bool:
        """Begins a command that reads the store, if there is anything to read of the sweep."""
        path = self.place.home / "store.db"
        with suppress(UserError), Store(path, create=False, readonly=True) as store:
            if any(row.ended for row in store.trials(store.find(sweep).digest)):
                folder = self.place.home.parent / f"reads-{time.monotonic_ns() % 10**6}"
                self._copy_store(folder / "copy")
                name = draw.choice(list(READERS))
                self.readers.append(Reader(self.place, folder, name, sweep))
                return True
        return False

    def _copy_store(self, copy: Path) -> None:
        """Copies the store and the files beside it between two moments of those that write them."""
        copy.mkdir(mode=0o700, parents=True)
        with ExitStack() as held:
            for process in self.driver_parts(*DRIVERS, TRACKER):
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
                    held.callback(_resume, process)
            for path in self.place.home.glob("*store.db*"):
                shutil.copy2(path, copy)
            with suppress(FileNotFoundError):
                shutil.copytree(self.place.home / "running", copy / "running")

    def check_beside(self) -> None:
        """Once everything is mended."""
        while self.readers:
            with closing(self.readers.pop()) as reader:
                reader.check(damaged=bool(self.spoilt))
        while self.beside:
            with closing(self.beside.pop()) as one:
                one.check()


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


def variables(place: Place) -> dict[str, str]:
    """Returns the environment variables of nodes."""
    return HEALTH | {"PYTHONPATH": place.environment["PYTHONPATH"]}


def end(process: subprocess.Popen[bytes]) -> None:
    """A process and all that it started, by pid."""
    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        ours = psutil.Process(process.pid)
        family = [*ours.children(recursive=True), ours]
    for one in family:
        with suppress(psutil.Error):
            one.kill()
    process.wait()


@contextmanager
def world(folder: Path) -> Iterator[World]:
    """A whole one, in ``folder``."""
    home, elsewhere = folder / "home", folder / "elsewhere"
    for path in (home, elsewhere):
        path.mkdir()
    with ExitStack() as held:
        disk = _mount(home)
        if disk:
            held.callback(subprocess.run, ["umount", "--lazy", home], check=True)
        host, machines = ray_heads.ADDRESS, list[Machine]()
        with suppress(PermissionError):
            host, machines = held.enter_context(network.machines(len(NODES)))
        server = sqlite_server(elsewhere, tracking_store.make_schema(elsewhere))
        held.callback(server.stop)
        place = held.enter_context(contextmanager(drive.place)(home))
        head = held.enter_context(ray_heads.cluster(place, host=host, **variables(place)))
        proxy = held.enter_context(closing(Proxy(server.uri)))
        place.variables |= {"RAY_ADDRESS": head.address, "MLFLOW_TRACKING_URI": proxy.uri}
        made = World(place, head, server, proxy, disk, dict(zip(NODES, machines, strict=False)))
        held.callback(lambda: [one.close() for one in (*made.beside, *made.readers)])
        made.mend()
        yield made


def _mount(home: Path) -> bool:
    """Mounts a small disk at ``home``; False where this user may not."""
    options = ["-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=700", "ringray-test", str(home)]
    with suppress(OSError):
        return subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    return False
