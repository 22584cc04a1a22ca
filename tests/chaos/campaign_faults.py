"""What a campaign can do to its world: each fault tells whether there was anything to do it to."""

from __future__ import annotations

import random
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from tests.chaos.world import BACK_S, DRIVERS, NODES, TRACKER, World
from tests.support import fault_proxy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BEHAVIOURS = (*fault_proxy.FAULTS, *fault_proxy.ENDLESS)  # of a server


def kill_rank(of: World, draw: random.Random) -> bool:
    return _signal(of.place.ranks(), draw, signal.SIGKILL)


def stop_rank(of: World, draw: random.Random) -> bool:
    return _signal(of.place.ranks(), draw, signal.SIGSTOP)


def kill_node(of: World, draw: random.Random) -> bool:
    raylets = [raylet for name in NODES if (raylet := of.raylet(name)) is not None]
    return _signal(raylets, draw, signal.SIGKILL)


def kill_driver(of: World, draw: random.Random) -> bool:
    return _signal(of.driver_parts(*DRIVERS), draw, signal.SIGKILL)


def interrupt_driver(of: World, draw: random.Random) -> bool:
    return _signal(of.driver_parts(*DRIVERS), draw, signal.SIGINT)


def kill_tracker(of: World, draw: random.Random) -> bool:
    return _signal(of.driver_parts(TRACKER), draw, signal.SIGKILL)


def kill_server(of: World, draw: random.Random) -> bool:
    if not of.server.running:
        return False
    of.server.stop()
    return True


def hold_server(of: World, draw: random.Random) -> bool:
    if not of.server.running:
        return False
    of.server.hold()
    return True


def misbehave(of: World, draw: random.Random) -> bool:
    """The tracking server answers in one of many wrong ways, to some requests or to all."""
    of.proxy.fail(draw.choice(BEHAVIOURS), draw.choice([1, 10, None]))
    return True


def kill_agent(of: World, draw: random.Random) -> bool:
    return _signal(of.agents(), draw, signal.SIGKILL)


def slow_agent(of: World, draw: random.Random) -> bool:
    """An agent of a node, or of somebody's local Ray, stops for some seconds."""
    agents = of.agents() + of.local_agents()
    with suppress(psutil.NoSuchProcess, IndexError):
        of.slow_down(draw.choice(agents), draw.uniform(1.0, BACK_S))
        return True
    return False


def second_user(of: World, draw: random.Random) -> bool:
    of.sweep_beside(_spec(of))
    return True


def damage_checkpoint(of: World, draw: random.Random) -> bool:
    of.train(draw)
    return True


def read(of: World, draw: random.Random) -> bool:
    return of.read(_spec(of).stem, draw)


def first_runs(of: World, draw: random.Random) -> bool:
    of.first_runs(draw)
    return True


def fill_disk(of: World, draw: random.Random) -> bool:
    if not of.disk:
        return False
    of.fill_disk()
    return True


def pull_cable(of: World, draw: random.Random) -> bool:
    plugged = sorted(of.machines.keys() - of.cut.keys())
    if not plugged:
        return False
    of.cut_cable(draw.choice(plugged))
    return True


def spoil_row(of: World, draw: random.Random) -> bool:
    return of.spoil_row(draw)


FAULTS: dict[str, Callable[[World, random.Random], bool]] = {
    "rank-killed": kill_rank,
    "rank-stopped": stop_rank,
    "node-killed": kill_node,
    "cable-pulled": pull_cable,
    "driver-killed": kill_driver,
    "driver-interrupted": interrupt_driver,
    "tracker-killed": kill_tracker,
    "server-killed": kill_server,
    "server-held": hold_server,
    "server-misbehaves": misbehave,
    "agent-killed": kill_agent,
    "agent-slow": slow_agent,
    "second-user": second_user,
    "first-runs": first_runs,
    "disk-full": fill_disk,
    "row-spoilt": spoil_row,
    "store-read": read,
    "checkpoint-damaged": damage_checkpoint,
}


def _spec(of: World) -> Path:
    """Returns the spec of the sweep that was begun last."""
    return max(of.place.home.glob("chaos-*.yaml"), key=lambda path: path.stat().st_mtime)


def _signal(among: list[psutil.Process], draw: random.Random, number: signal.Signals) -> bool:
    if not among:
        return False
    with suppress(psutil.NoSuchProcess):
        draw.choice(among).send_signal(number)
        return True
    return False
