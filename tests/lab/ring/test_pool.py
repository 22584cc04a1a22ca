"""When a ring is started, kept, re-formed and given back; what its ranks ask for and bring."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ringray.base.errors import PlaceError, StoppedError
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from ringray.lab.cluster.fit import Cluster
from ringray.lab.cluster.machines import Machines
from ringray.lab.cluster.placement_wait import MovedError
from ringray.lab.plan import plan
from ringray.lab.ring import pool
from ringray.lab.ring.actor import RankInfo
from ringray.lab.ring.group import mixed_versions
from ringray.lab.ring.pool import RingPool
from ringray.lab.specs import model as spec
from ringray.tuning.table import Place

PLACE = Place("cpu", "k", "2.13.0", "3.9.0")
FEW = Capacity((NodeGroup("node", {"CPU": 8.0}),))
MANY = Capacity((NodeGroup("node", {"CPU": 8.0, "GPU": 8.0}, 4),))
STATIC, GROWING, GPUS = (
    Cluster(False, FEW),
    Cluster(False, FEW, lambda: MANY),
    Cluster(False, MANY),
)


class Counted:
    """A stand-in for a ring; ``alive`` holds those that are not closed."""

    alive: list[Counted] = []  # noqa: RUF012
    lacks: str | None = None

    def __init__(
        self, capacity: int, placement: Any, timeout: float, wait_limits: Any, avoid: Any = ()
    ) -> None:
        self.capacity, self.placement, self.size = capacity, placement, 0
        self.wait_limits, self.avoid = wait_limits, avoid
        self.ranks = [RankInfo("10.0.0.7", "c", PLACE, "", self.lacks)]
        self.alive.append(self)

    def form(self, size: int, *_: object) -> None:
        assert size <= self.capacity
        self.size = size

    def close(self) -> None:
        self.alive.remove(self)


@pytest.fixture(autouse=True)
def rings(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    monkeypatch.setattr(pool, "ActorRing", Counted)
    monkeypatch.setattr(Counted, "alive", [])
    return Counted.alive


def sweep(ring: str, limits: str = "{}") -> tuple[Any, list[Any]]:
    text = f"version: 1\nname: a\nkind: latency\nring: {ring}\nproblem: {{seq_len: 64}}\n"
    read = spec.parse(text + f"limits: {limits}\n")
    return read, [trial.config for trial in plan.build(read).trials]


def capacities(place: Cluster, ring: str) -> list[int]:
    """Of each trial's ring the actors."""
    read, configs = sweep(ring)
    shared = RingPool(place, read, lambda text: None)
    taken = []
    for number, config in enumerate(configs):
        taken.append(shared.take(config, configs[number:]).capacity)
        shared.rest()
        assert len(Counted.alive) == 1
    shared.close()
    assert Counted.alive == []
    return taken


@pytest.mark.parametrize(
    ("place", "device", "want"),
    [
        (STATIC, "cpu", [4, 4, 4]),  # re-formed, on the same actors
        (GROWING, "cpu", [2, 4, 3]),
        (GPUS, "cuda", [2, 4, 3]),
    ],
)
def test_rings_have_spare_ranks_only_where_those_cost_nothing(
    place: Cluster, device: str, want: list[int]
) -> None:
    assert capacities(place, f"{{size: [2, 4, 3], device: {device}}}") == want


def test_a_ring_whose_nodes_another_took_meanwhile_has_others(
    rings: list[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        {"NodeID": name, "NodeManagerAddress": name, "Alive": True, "Resources": {"CPU": 8.0}}
        for name in "ab"
    ]
    machines = Machines(lambda: nodes, grows=True)
    asked: list[list[str]] = []

    class Placed(Counted):
        def __init__(self, *given: Any) -> None:
            *given, avoid, placed = given
            super().__init__(*given, avoid)
            asked.append(sorted(avoid))
            assert not self.wait_limits.moved()
            if len(asked) == 1:
                assert machines.take("another", self.placement, ["a"])
                assert self.wait_limits.moved()
            self.nodes = [next(name for name in "ab" if name not in avoid)] * self.capacity
            try:
                placed(self.nodes)
            except MovedError:
                self.close()
                raise

    monkeypatch.setattr(pool, "ActorRing", Placed)
    read, configs = sweep("{size: 2, device: cpu, concurrent: 2}")
    shared = RingPool(GROWING, read, lambda text: None, machines=machines)
    ring: Any = shared.take(configs[0], configs)
    assert (asked, ring.nodes, len(rings)) == ([[], ["a"]], ["b", "b"], 1)
    shared.close()
    assert not machines.holds(shared)


def test_a_ring_that_comes_too_late_is_given_back(
    rings: list[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner was told that all is over while it started, and found nothing to close."""
    stop = threading.Event()

    class Late(Counted):
        def __init__(self, *given: Any) -> None:
            assert given[3].stop is stop  # so that it need not wait for its place
            super().__init__(*given)
            stop.set()

    monkeypatch.setattr(pool, "ActorRing", Late)
    read, configs = sweep("{size: 2, device: cpu}")
    shared = RingPool(GROWING, read, lambda text: None, stop=stop)
    with pytest.raises(StoppedError):
        shared.take(configs[0], configs)
    assert rings == []


@pytest.mark.parametrize(
    ("device", "backend", "reason"),
    [("cuda", "auto", "no C compiler"), ("cuda", "aten", ""), ("cpu", "aten", "")],
)
def test_a_gpu_ring_without_a_compiler_is_told(
    rings: list[Counted], monkeypatch: pytest.MonkeyPatch, device: str, backend: str, reason: str
) -> None:
    monkeypatch.setattr(Counted, "lacks", "no C compiler (gcc or clang)")
    read, configs = sweep(f"{{size: 2, device: {device}}}\nstrategy: {{backend: {backend}}}")
    shared = RingPool(GPUS, read, lambda text: None)
    if reason:
        with pytest.raises(PlaceError, match=f"cannot start on 10.0.0.7: {reason}"):
            shared.take(configs[0], configs)
    else:
        shared.take(configs[0], configs)
    shared.close()
    assert rings == []


@pytest.mark.parametrize("place", [GROWING, STATIC])
def test_a_busy_ring_is_kept_and_an_idle_one_released(
    rings: list[Counted], place: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[Any] = []

    class Timer:
        def __init__(self, seconds: float, call: Any) -> None:
            self.fire = call
            timers.append(self)

        start = cancel = join = lambda self: None

    monkeypatch.setattr(pool.threading, "Timer", Timer)
    read, configs = sweep("{size: [2, 4], device: cpu, idle_release: 1h}")
    shared = RingPool(place, read, lambda text: None)
    first = shared.take(configs[0], configs[:1])
    shared.rest()
    assert shared.take(configs[0], configs) is first
    assert shared.take(configs[1], configs[1:]) is not first  # which has too few ranks
    assert len(rings) == 1
    shared.rest()
    timers[-1].fire()
    assert rings == []
    shared.take(configs[0], configs)
    shared.close()
    assert rings == []


# What a rank asks for, and what it brings


@pytest.mark.parametrize(
    ("device", "bundle"),
    [
        ("cuda", {"CPU": 1.0, "GPU": 1.0}),
        ("auto", {"CPU": 1.0, "GPU": 1.0}),
        ("cpu", {"CPU": 1.0}),
    ],
)
def test_a_rank_on_a_gpu_asks_for_one(device: str, bundle: dict[str, float]) -> None:
    _, (config,) = sweep(f"{{size: 2, device: {device}}}")
    placement = GPUS.placement(config)
    assert dict(placement.bundle) == bundle
    assert placement.device == ("cpu" if device == "cpu" else "cuda")


def introduced(address: str, torch: str, triton: str = "3.9.0") -> RankInfo:
    return RankInfo(address, "c", Place("cpu", "k", torch, triton), "")


def test_a_ring_of_mixed_versions_is_refused_by_node_and_version() -> None:
    first, same = introduced("10.0.0.1", "2.13.0+cu130"), introduced("10.0.0.2", "2.13.0+cu130")
    assert mixed_versions([first, same], "2.13.0+cpu") is None  # a driver without a GPU
    assert mixed_versions([first], None) is None
    for other in (
        introduced("10.0.0.3", "2.12.1+cu130"),
        introduced("10.0.0.3", "2.13.0+cu128"),
        introduced("10.0.0.3", "2.13.0+cu130", "3.8.0"),
    ):
        refusal = mixed_versions([first, same, other], "2.13.0")
        assert "10.0.0.1 has torch 2.13.0+cu130, triton 3.9.0; " in refusal
        assert f"10.0.0.3 has torch {other.place.torch}, triton {other.place.triton}; " in refusal
    assert "this driver has torch 2.12.0;" in str(mixed_versions([first], "2.12.0"))
