"""Work on rings side by side, in a time that only counts."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest

from ringray.lab.cluster.capacity import Placement
from ringray.lab.cluster.machines import Machines
from ringray.lab.driver import dispatch
from ringray.lab.driver.dispatch import Dispatcher
from ringray.lab.driver.schedule import Schedule, Work
from ringray.lab.plan.plan import build
from ringray.lab.ring.quarantine import Quarantine
from ringray.lab.specs.model import parse
from ringray.lab.trial.outcome import Outcome

NODES = [
    {"NodeID": f"n{i}", "NodeManagerAddress": f"n{i}", "Alive": True,
     "Resources": {"CPU": 1.0, "GPU": 1.0}}
    for i in range(8)
]  # fmt: skip
MIXED = """
version: 1
name: mixed
kind: latency
ring: {size: [2, 4, 8], device: cuda}
problem: {seq_len: [1k, 2k, 4k, 8k, 16k], heads: 8}
strategy: {partition: [zigzag, contiguous, striped]}
"""


class Simulation:
    """Eight nodes and the rings on them; ``now`` in seconds."""

    def __init__(self, seconds: Callable[[Work], float], pools: int = 8) -> None:
        self.now, self.seconds = 0.0, seconds
        self.machines = Machines(lambda: NODES)
        self.pools = [Pool(self) for _ in range(pools)]
        self.under_way: dict[Future[Any], tuple[float, Any]] = {}
        self.log: list[tuple[float, float, Any, Pool]] = []  # begin, end, config, ring

    def submit(self, _: Any, work: Work, pool: Pool) -> Future[Any]:
        pool.take(work.trial.config)
        future: Future[Any] = Future()
        end = self.now + self.seconds(work)
        self.under_way[future] = end, work
        self.log.append((self.now, end, work.trial.config, pool))
        return future

    def wait(self, running: Any, **_: Any) -> tuple[set[Future[Any]], None]:
        future = min(running, key=lambda one: self.under_way[one][0])
        self.now, work = self.under_way.pop(future)
        measured = {"median_ms": self.seconds(work) * 1e3}
        count = float(work.config.measure.repeats)
        future.set_result(Outcome("ok", None, measured, {"ms": [1.0] * int(count)}))
        return {future}, None

    def run(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = build(parse(text))
        schedule = Schedule(plan, {}, {})
        monkeypatch.setattr(dispatch, "wait", self.wait)
        rings: Any = self.pools
        dispatcher = Dispatcher(
            schedule, rings, lambda work, ring: Outcome("ok"), Quarantine(), self.machines,
            plan.spec.search.method,
        )  # fmt: skip
        threads: Any = self
        for work, outcome in dispatcher.side_by_side(threads):
            schedule.tell(work, outcome)
        if plan.spec.search.method == "grid":
            assert len(self.log) == len(plan.trials), "nothing is lost or measured twice"
        for begin, end, one, ring in self.log:
            beside = [c.ring.size for b, e, c, r in self.log if b < end and begin < e and r != ring]
            assert one.ring.size + max(beside, default=0) <= 8


class Pool:
    """A stand-in for a pool of rings."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.size = simulation, 0

    def placement(self, _: Any) -> Placement:
        return Placement("cuda", "PACK", (("CPU", 1.0), ("GPU", 1.0)))

    def suits(self, config: Any) -> bool:
        return self.size == config.ring.size

    def take(self, config: Any) -> None:
        if self.suits(config):
            return
        self.close()
        machines, placement = self.simulation.machines, self.placement(config)
        free = [
            node["NodeID"] for node in NODES if node["NodeID"] not in machines.closed(placement)
        ]
        assert len(free) >= config.ring.size, "it was begun without room"
        self.size = config.ring.size
        assert machines.take(self, placement, free[: self.size])

    def rest(self) -> None:
        pass

    def close(self) -> None:
        self.size = 0
        self.simulation.machines.release(self)


def test_nodes_are_used_by_rings_of_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        draw = random.Random(seed)
        times: dict[str, float] = {}

        def seconds(work: Work, times: Any = times, draw: Any = draw) -> float:
            return float(times.setdefault(work.trial.key, draw.uniform(1, 10)))

        simulated = Simulation(seconds)
        simulated.run(MIXED, monkeypatch)
        used = sum((end - begin) * one.ring.size for begin, end, one, _ in simulated.log)
        longest = max(end for _, end, _, _ in simulated.log)
        assert used / (8 * longest) >= 0.85, seed
        sizes = [one.ring.size for _, _, one, _ in simulated.log]
        assert sizes[:3] == [8] * 3, "what needs most nodes waits for none"


def test_points_that_are_compared_have_one_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulation(lambda work: float(len(work.trial.config.strategy.partition)))
    text = MIXED.replace("[2, 4, 8]", "[2, 4]") + "search: {method: halving}\n"
    simulated.run(text, monkeypatch)
    for size, seq_len in {(c.ring.size, c.problem.seq_len) for _, _, c, _ in simulated.log}:
        some = sorted(
            (begin, end, id(pool))
            for begin, end, config, pool in simulated.log
            if (config.ring.size, config.problem.seq_len) == (size, seq_len)
        )
        assert len({pool for *_, pool in some}) == 1
        assert all(a[1] <= b[0] for a, b in pairwise(some))
    assert max(sum(b <= at < e for b, e, _, _ in simulated.log) for at, *_ in simulated.log) > 1
