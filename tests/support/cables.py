"""Cables of the machines of ``cluster.network``: pulled, plugged in again, and laid between two."""

from __future__ import annotations

from cluster.network import Machine, cable, ip, shape


def runs(machine: Machine, pid: int) -> bool:
    """Tells whether a process runs on a machine."""
    return machine.name in ip("netns", "identify", str(pid)).split()


def cut(machine: Machine) -> None:
    """Pulls the cable of a machine: nothing arrives any more, and nobody is told."""
    ip("link", "set", machine.name, "down")


def mend(machine: Machine) -> None:
    """Plugs the cable in again."""
    ip("link", "set", machine.name, "up")


def wire(a: Machine, b: Machine, rate: str) -> None:
    """Connects two machines by a cable of their own, which they take from now on."""
    ip("-n", a.name, "link", "add", "wire", *cable("wire", b.name))
    for machine, far in ((a, b), (b, a)):
        ip("-n", machine.name, "link", "set", "wire", "up")
        ip("-n", machine.name, "route", "add", far.address, "dev", "wire", "src", machine.address)
        shape(rate, "wire", "-n", machine.name)


def lose(machine: Machine, other: Machine) -> None:
    """Lets nothing that a machine sends to another arrive any more, and nobody is told."""
    wrong = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
    ip("-n", machine.name, "neighbour", "replace", other.address, *wrong)
