"""Machines with a network of their own: namespaces on one bridge, whose cables can be pulled."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Machine:
    """``name`` is that of its namespace and of the cable's end at the bridge."""

    name: str
    address: str

    @property
    def inside(self) -> list[str]:
        """Returns the words before a command that runs there."""
        return ["ip", "netns", "exec", self.name]

    def runs(self, pid: int) -> bool:
        return self.name in _ip("netns", "identify", str(pid)).split()

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        _ip("link", "set", self.name, "down")

    def mend(self) -> None:
        _ip("link", "set", self.name, "up")

    def shape(self, mbit: float) -> None:
        """Limits what it sends and what arrives there, each by a token bucket."""
        _shape([], self.name, mbit)
        _shape(self.inside, "eth0", mbit)

    def wire(self, other: Machine, mbit: float) -> None:
        """Connects two machines by a cable of their own, which they take from now on."""
        veth = ("type", "veth", "peer", "wire", "netns", other.name)
        _ip("-n", self.name, "link", "add", "wire", *veth)
        for one, far in ((self, other), (other, self)):
            _ip("-n", one.name, "link", "set", "wire", "up")
            _ip("-n", one.name, "route", "add", far.address, "dev", "wire", "src", one.address)
            _shape(one.inside, "wire", mbit)

    def lose(self, other: Machine) -> None:
        """Nothing that it sends to the other arrives any more, and nobody is told."""
        wrong = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
        _ip("-n", self.name, "neighbour", "replace", other.address, *wrong)


def _shape(inside: list[str], device: str, mbit: float) -> None:
    bucket = f"root tbf rate {mbit}mbit burst 64kb latency 50ms".split()
    words = [*inside, "tc", "qdisc", "replace", "dev", device, *bucket]
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def machines(count: int) -> Iterator[tuple[str, list[Machine]]]:
    """The address of this machine on their bridge, and ``count`` machines.

    Raises:
        PermissionError: this user may not make any, there is no ``ip``, or none can be reached.
    """
    net = f"10.{random.randrange(64, 255)}.{random.randrange(256)}"
    bridge = f"rr{os.getpid() % 10**7}"
    made = [Machine(f"{bridge}n{i}", f"{net}.{i + 2}") for i in range(count)]
    if shutil.which("ip") is None:
        raise PermissionError("there is no command `ip`")
    try:
        try:
            _build(bridge, f"{net}.1", made)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PermissionError("needs the right to make networks") from error
        yield f"{net}.1", made
    finally:
        for one in made:
            # The cable would go with the namespace, but that may outlive its name for a while.
            _ip("link", "delete", one.name, check=False)
            _ip("netns", "delete", one.name, check=False)
        _ip("link", "delete", bridge, check=False)


def _build(bridge: str, address: str, machines: list[Machine]) -> None:
    _ip("link", "add", bridge, "type", "bridge")
    _ip("address", "add", f"{address}/24", "dev", bridge)
    _ip("link", "set", bridge, "up")
    for one in machines:
        _ip("netns", "add", one.name)
        _ip("link", "add", one.name, "type", "veth", "peer", "eth0", "netns", one.name)
        _ip("link", "set", one.name, "master", bridge, "up")
        _ip("-n", one.name, "address", "add", f"{one.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", one.name, "link", "set", link, "up")
        with suppress(ConnectionRefusedError):  # said by the machine itself
            socket.create_connection((one.address, 1), timeout=5.0).close()


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True)
    return done.stdout
