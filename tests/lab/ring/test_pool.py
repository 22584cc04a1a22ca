"""When a ring is started, kept, re-formed and given back; with rings that only count."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ringray.base.errors import PlaceError, StoppedError
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from ringray.lab.cluster.fit import Cluster
from ringray.lab.cluster.machines import Machines
from ringray.lab.cluster.placement_wait import MovedError
from ringray.lab.plan import plan
from ringray.lab.ring import pool
from ringray.lab.ring.actor import RankInfo
from ringray.lab.ring.pool import RingPool
from ringray.lab.specs import model as spec
from ringray.tuning.table import Place
from tests.support.place import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

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

    def form(self, size: int, *_: object) -> bool:
        assert size <= self.capacity
        formed, self.size = self.size == size, size
        return formed

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


def capacities(place: Cluster, ring: str) -> list[tuple[int, bool]]:
    """Of each trial's ring the actors, and whether it was warm."""
    read, configs = sweep(ring)
    shared = RingPool(place, read, lambda text: None)
    found = []
    for at, one in enumerate(configs):
        made, was_warm = shared.take(one, configs[at:])
        found.append((made.capacity, was_warm))
        shared.rest()
        assert len(Counted.alive) == 1
    shared.close()
    assert Counted.alive == []
    return found


@pytest.mark.parametrize(
    ("place", "device", "want"),
    [
        (STATIC, "cpu", [(4, False), (4, False), (4, False)]),  # re-formed, on the same actors
        (GROWING, "cpu", [(2, False), (4, False), (3, False)]),
        (GPUS, "cuda", [(2, False), (4, False), (3, False)]),
    ],
)
def test_rings_have_spare_ranks_only_where_those_cost_nothing(
    place: Cluster, device: str, want: list[tuple[int, bool]]
) -> None:
    assert capacities(place, f"{{size: [2, 4, 3], device: {device}}}") == want


def test_a_ring_that_fits_is_kept(rings: list[Counted]) -> None:
    read, configs = sweep("{size: 2, device: cpu}")
    shared = RingPool(GROWING, read, lambda text: None)
    first, was_warm = shared.take(configs[0], configs)
    assert not was_warm
    assert shared.take(configs[0], configs) == (first, True)
    shared.close()
    again, was_warm = shared.take(configs[0], configs)
    assert not was_warm
    assert again is not first


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
    ring, _ = shared.take(configs[0], configs)
    assert (asked, ring.nodes, len(rings)) == ([[], ["a"]], ["b", "b"], 1)
    shared.close()
    assert not machines.holds(shared)


def test_a_ring_that_is_too_small_is_replaced(rings: list[Counted]) -> None:
    """Of the larger ring nothing was known when the first was started."""
    read, configs = sweep("{size: [2, 4], device: cpu}")
    shared = RingPool(STATIC, read, lambda text: None)
    assert shared.take(configs[0], configs[:1])[0].capacity == 2
    assert shared.take(configs[1], configs[1:])[0].capacity == 4
    assert len(rings) == 1
    shared.close()


def test_an_idle_ring_is_released_and_a_busy_one_is_not(rings: list[Counted]) -> None:
    read, configs = sweep("{size: 2, device: cpu, idle_release: 200ms}")
    shared = RingPool(GROWING, read, lambda text: None)
    for _ in range(4):  # in use for longer than that, and idle for less
        shared.take(configs[0], configs)
        time.sleep(0.25)
        assert len(rings) == 1
        shared.rest()
        time.sleep(0.01)
    assert len(rings) == 1
    wait_until("the idle ring is released", lambda: not rings)
    shared.take(configs[0], configs)
    assert len(rings) == 1
    shared.close()


def test_no_timer_outlives_its_sweep(rings: list[Counted]) -> None:
    read, configs = sweep("{size: 2, device: cpu, idle_release: 1h}")
    shared = RingPool(GROWING, read, lambda text: None)
    before = threading.active_count()
    shared.take(configs[0], configs)
    shared.rest()
    shared.close()
    wait_until("the timer ends", lambda: threading.active_count() == before)


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


def test_how_long_a_place_is_waited_for_is_the_specs(rings: list[Counted]) -> None:
    read, configs = sweep("{size: 64, device: cpu}", "{place_timeout: 3m}")
    notes: list[str] = []
    unknown: Callable[[], Capacity | None] = lambda: None  # noqa: E731
    shared = RingPool(Cluster(False, FEW, unknown), read, notes.append)
    shared.take(configs[0], configs)
    (ring,) = rings
    assert (ring.wait_limits.seconds, ring.wait_limits.will_fit) == (180.0, False)
    assert notes == ["starting 64 cpu actors"]
    shared.close()


@pytest.mark.parametrize(
    ("device", "backend", "said"),
    [("cuda", "auto", "no C compiler"), ("cuda", "aten", ""), ("cpu", "aten", "")],
)
def test_a_gpu_ring_without_a_compiler_says_so(
    rings: list[Counted], monkeypatch: pytest.MonkeyPatch, device: str, backend: str, said: str
) -> None:
    monkeypatch.setattr(Counted, "lacks", "no C compiler (gcc or clang)")
    read, configs = sweep(f"{{size: 2, device: {device}}}\nstrategy: {{backend: {backend}}}")
    shared = RingPool(GPUS, read, lambda text: None)
    if said:
        with pytest.raises(PlaceError, match=f"cannot start on 10.0.0.7: {said}"):
            shared.take(configs[0], configs)
    else:
        shared.take(configs[0], configs)
    shared.close()
    assert rings == []


def test_each_start_has_a_cause(rings: list[Counted]) -> None:
    read, configs = sweep("{size: [2, 4], device: cpu, idle_release: 10ms}")
    causes: list[str] = []
    shared = RingPool(GROWING, read, lambda text: None, started=causes.append)
    for cause in ("first", "other-needs"):
        shared.take(configs[len(causes)], configs)
        assert causes[-1] == cause
    shared.close("stalled")
    shared.take(configs[0], configs)
    shared.take(configs[0], configs)  # the same ring
    shared.rest()
    wait_until("the ring is idle", lambda: not rings)
    shared.take(configs[0], configs)
    shared.close()
    shared.close("timeout")  # of no ring
    shared.take(configs[0], configs)
    shared.close()
    assert causes == ["first", "other-needs", "stalled", "idle", "room"]


def test_a_start_that_failed_is_the_cause_of_the_next(
    rings: list[Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> Any:
        raise PlaceError("no room")

    read, configs = sweep("{size: 2, device: cpu}")
    causes: list[str] = []
    shared = RingPool(GROWING, read, lambda text: None, started=causes.append)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "ActorRing", fails)
        with pytest.raises(PlaceError):
            shared.take(configs[0], configs)
    shared.close("rank-died")
    shared.take(configs[0], configs)
    shared.close()
    assert causes == ["first", "failed-start"]
