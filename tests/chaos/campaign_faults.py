"""Faults of a campaign: each fault tells whether there was anything to do it to."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from tests.chaos.world import BACK_S, DRIVERS, NODES, TRACKER, World
from tests.support import fault_proxy

Fault = Callable[[World, random.Random], bool]

BEHAVIOURS = (*fault_proxy.FAULTS, *fault_proxy.ENDLESS)  # of a server


def ranks(of: World) -> list[psutil.Process]:
    return of.place.ranks()


def raylets(of: World) -> list[psutil.Process]:
    return [raylet for name in NODES if (raylet := of.raylet(name)) is not None]


def drivers(of: World) -> list[psutil.Process]:
    return of.driver_parts(*DRIVERS)


def trackers(of: World) -> list[psutil.Process]:
    return of.driver_parts(TRACKER)


def send(
    victims: Callable[[World], list[psutil.Process]],
    number: signal.Signals,
    of: World,
    draw: random.Random,
) -> bool:
    """Signals one of the victims."""
    with suppress(psutil.NoSuchProcess, IndexError):
        draw.choice(victims(of)).send_signal(number)
        return True
    return False


def kill_server(of: World, draw: random.Random) -> bool:
    running = of.server.running
    if running:
        of.server.stop()
    return running


def hold_server(of: World, draw: random.Random) -> bool:
    running = of.server.running
    if running:
        of.server.hold()
    return running


def misbehave(of: World, draw: random.Random) -> bool:
    """The tracking server answers in one of many wrong ways, to some requests or to all."""
    of.proxy.fail(draw.choice(BEHAVIOURS), draw.choice([1, 10, None]))
    return True


def slow_agent(of: World, draw: random.Random) -> bool:
    """An agent of a node, or of somebody's local Ray, stops for some seconds."""
    with suppress(psutil.NoSuchProcess, IndexError):
        of.slow_down(draw.choice(of.agents() + of.local_agents()), draw.uniform(1.0, BACK_S))
        return True
    return False


def second_user(of: World, draw: random.Random) -> bool:
    of.sweep_beside(newest_spec(of))
    return True


def damage_checkpoint(of: World, draw: random.Random) -> bool:
    of.train(draw)
    return True


def read(of: World, draw: random.Random) -> bool:
    return of.read(newest_spec(of).stem, draw)


def first_runs(of: World, draw: random.Random) -> bool:
    of.first_runs(draw)
    return True


def fill_disk(of: World, draw: random.Random) -> bool:
    if of.disk:
        of.fill_disk()
    return of.disk


def pull_cable(of: World, draw: random.Random) -> bool:
    plugged = sorted(of.machines.keys() - of.cut.keys())
    if plugged:
        of.cut_cable(draw.choice(plugged))
    return bool(plugged)


FAULTS: dict[str, Fault] = {
    "rank-killed": partial(send, ranks, signal.SIGKILL),
    "rank-stopped": partial(send, ranks, signal.SIGSTOP),
    "node-killed": partial(send, raylets, signal.SIGKILL),
    "cable-pulled": pull_cable,
    "driver-killed": partial(send, drivers, signal.SIGKILL),
    "driver-interrupted": partial(send, drivers, signal.SIGINT),
    "tracker-killed": partial(send, trackers, signal.SIGKILL),
    "server-killed": kill_server,
    "server-held": hold_server,
    "server-misbehaves": misbehave,
    "agent-killed": partial(send, World.agents, signal.SIGKILL),
    "agent-slow": slow_agent,
    "second-user": second_user,
    "first-runs": first_runs,
    "disk-full": fill_disk,
    "row-spoilt": World.spoil_row,
    "store-read": read,
    "checkpoint-damaged": damage_checkpoint,
}


def newest_spec(of: World) -> Path:
    """Returns the spec of the sweep that was begun last."""
    return max(of.place.home.glob("chaos-*.yaml"), key=lambda path: path.stat().st_mtime)
