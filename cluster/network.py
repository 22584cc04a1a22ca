"""Machines with a network of their own: namespaces on one bridge, whose cables can be pulled and
whose links a token bucket shapes."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

# Large frames: each MiB in those of 1,500 bytes takes 18 ms of a core, which computes meanwhile.
_MTU = 9000
_PAYLOAD = (_MTU - 52) / (_MTU + 14)  # of an Ethernet frame with a full TCP segment
_RATE = re.compile(r"(?P<number>[1-9][0-9]*)(?P<unit>[kmg])bit")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_BURST_S = 0.002  # seconds of its rate that a bucket holds: timers come late
_BURST = 16384  # bytes that it holds at least: a frame and more
_QUEUE = 1 << 28  # bytes before it: enough that nothing is dropped and sent again
PREFIX = "rr"  # of the names of bridges, machines and folders; the maker's pid follows
_OWNER = re.compile(PREFIX + r"(\d+)n\d+")
_NAMES = Path("/run/netns")


@dataclass(frozen=True)
class Machine:
    """``name`` is that of its namespace and of the cable's end at the bridge."""

    name: str
    address: str

    @property
    def inside(self) -> list[str]:
        """Returns the words before a command that runs there."""
        return ["ip", "netns", "exec", self.name]

    def shape(self, rate: str) -> None:
        """Limits what it sends and what it receives to ``rate`` (``200mbit``) each; OSError if that
        cannot be."""
        shape(rate, "eth0", "-n", self.name)
        shape(rate, self.name)


def payload(rate: str) -> float:
    """Returns the bytes/s that a link of ``rate`` carries for TCP; ValueError if it is no rate."""
    found = _RATE.fullmatch(rate)
    if found is None:
        raise ValueError(f"got {rate!r}, expected a rate such as 200mbit (kbit, mbit, gbit)")
    return int(found["number"]) * _UNITS[found["unit"]] / 8 * _PAYLOAD


@contextmanager
def machines(count: int) -> Iterator[tuple[str, list[Machine]]]:
    """The address of this machine on their bridge, and ``count`` machines. Those of processes that
    were killed are removed.

    Raises:
        PermissionError: this user may not make any, there is no ``ip``, or none can be reached.
    """
    net = f"10.{random.randrange(64, 255)}.{random.randrange(256)}"
    bridge = f"{PREFIX}{os.getpid()}"
    made = [Machine(f"{bridge}n{i}", f"{net}.{i + 2}") for i in range(count)]
    if shutil.which("ip") is None:
        raise PermissionError("there is no command `ip`")
    _remove(_left())
    try:
        try:
            _build(bridge, f"{net}.1", made)
        except (OSError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            raise PermissionError(f"needs the right to make networks: {said}") from error
        yield f"{net}.1", made
    finally:
        _remove([one.name for one in made])


def _build(bridge: str, address: str, machines: list[Machine]) -> None:
    ip("link", "add", bridge, "type", "bridge")
    ip("address", "add", f"{address}/24", "dev", bridge)
    ip("link", "set", bridge, "up")
    for one in machines:
        ip("netns", "add", one.name)
        ip("link", "add", one.name, *cable("eth0", one.name))
        ip("link", "set", one.name, "master", bridge, "up")
        ip("-n", one.name, "address", "add", f"{one.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            ip("-n", one.name, "link", "set", link, "up")
        with suppress(ConnectionRefusedError):  # said by the machine itself
            socket.create_connection((one.address, 1), timeout=5.0).close()


def cable(end: str, machine: str) -> list[str]:
    """Returns the words for a cable whose other end has that name in ``machine``."""
    return f"mtu {_MTU} type veth peer {end} mtu {_MTU} netns {machine}".split()


def _left() -> list[str]:
    """Returns the names of machines whose maker is no more; ends what runs there, and removes the
    maker's folders."""
    found = []
    for place in _NAMES.glob(f"{PREFIX}*n*"):
        with suppress(OSError, psutil.Error):
            owner = _OWNER.fullmatch(place.name)
            if owner is None or _made_by(int(owner[1]), place):
                continue
            found.append(place.name)
            for pid in ip("netns", "pids", place.name, check=False).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}{owner[1]}-*"):
                shutil.rmtree(folder, ignore_errors=True)
    return found


def _made_by(pid: int, place: Path) -> bool:
    """Tells whether the process ``pid`` lives and is older than ``place``."""
    if not psutil.pid_exists(pid):
        return False
    return bool(psutil.Process(pid).create_time() <= place.stat().st_mtime)


def _remove(names: list[str]) -> None:
    """Removes machines, and their bridges."""
    for name in names:
        # The cable would go with the namespace, but that may outlive its name for a while.
        ip("link", "delete", name, check=False)
        ip("netns", "delete", name, check=False)
    for bridge in {name.rpartition("n")[0] for name in names}:
        ip("link", "delete", bridge, check=False)


def shape(rate: str, device: str, *where: str) -> None:
    """Limits what a device sends; ``where``: the options of ``tc`` for its namespace."""
    burst = max(_BURST, round(payload(rate) * _BURST_S))
    bucket = f"root tbf rate {rate} burst {burst} limit {_QUEUE}".split()
    try:
        _run("tc", *where, "qdisc", "replace", "dev", device, *bucket)
    except subprocess.CalledProcessError as error:
        raise OSError(f"links cannot be shaped: {error.stderr.strip()}") from error


def ip(*arguments: str, check: bool = True) -> str:
    """Returns what the command ``ip`` prints."""
    return _run("ip", *arguments, check=check)


def _run(*words: str, check: bool = True) -> str:
    return subprocess.run(words, check=check, capture_output=True, text=True).stdout
