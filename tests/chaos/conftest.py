"""Machines of their own for the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cluster.network import Machine, machines
from tests.chaos.struck import NODE
from tests.support import ray_heads
from tests.support.place import Place
from tests.support.ray_heads import Head

RATE = "100mbit"


@pytest.fixture
def hosts(request: pytest.FixtureRequest, place: Place) -> Iterator[tuple[Head, list[Machine]]]:
    """A Ray over so many machines, each of which has an address and a shaped cable of its own."""
    with ExitStack() as stack:
        try:
            host, there = stack.enter_context(machines(request.param))
        except PermissionError as error:
            pytest.skip(str(error))
        for machine in there:
            machine.shape(RATE)
        nodes = [NODE] * request.param
        cluster = ray_heads.cluster(place, *nodes, host=host, machines=there)
        yield stack.enter_context(cluster), there
