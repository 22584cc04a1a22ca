"""What ringray changes in the Ray that it starts."""

from __future__ import annotations

import pytest
from ray._private import parameter
from ray.autoscaler._private import constants
from ray.dashboard import consts

from ringray.lab.cluster import ray_private


class Taken:
    """Ports on which something else listens: the first five that are asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __contains__(self, port: int) -> bool:
        self.asked.append(port)
        return len(self.asked) <= 5


def test_agents_get_no_port_of_another_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent whose port is taken ends, and its raylet with it."""
    own = constants.AUTOSCALER_METRIC_PORT, consts.DASHBOARD_METRIC_PORT
    assert own == ray_private._METRIC_PORTS
    taken = Taken()
    monkeypatch.setattr(ray_private, "_METRIC_PORTS", taken)
    with ray_private.fixed_ports():
        chosen = parameter.RayParams()
    ports = {getattr(chosen, name) for name in ray_private._AGENT_PORTS}
    assert len(ports) == 4
    assert ports == set(taken.asked[5:])
