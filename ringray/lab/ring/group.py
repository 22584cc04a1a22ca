"""A ring: actors that are placed, joined, run and killed as one unit.

A placement group and its actors live and die together. Any fault ends the whole generation: peers
of a dead or stalled rank may be stuck inside a hop, so their messages cannot be trusted. Ranks may
go on only if all of them have answered, as after a lack of memory on which they agreed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ringray.base.deadline import within
from ringray.base.errors import PlaceError
from ringray.base.provenance import code_digest, versions
from ringray.lab.cluster import placement_wait
from ringray.lab.cluster.capacity import Placement
from ringray.lab.cluster.placement_wait import WaitLimits
from ringray.lab.kinds import TrialKind
from ringray.lab.ring.actor import Rank, RankInfo
from ringray.lab.ring.calls import BESIDE, RankCalls
from ringray.lab.ring.monitor import RankMonitor, RingFault, Watch
from ringray.lab.ring.order import RankLocation, check, ordered, zones_of
from ringray.lab.trial import training
from ringray.lab.trial.config import TrialConfig, resolved
from ringray.lab.trial.measurement import RankReport
from ringray.tuning.table import Place

CLOSE_S = 10.0  # seconds for Ray to take a ring back
START_TIMEOUT = 120.0  # seconds for actors to start and import torch
LATER_S = 30.0  # process groups time out so much later than the driver, which knows more

_generations = itertools.count(1)


class ActorRing:
    """``capacity`` started actors; the first ``size`` form the process group.

    Args:
        timeout: seconds for one operation among them.
        wait_limits: of the wait for their place.
        avoid: Ray's ids of nodes that get none of them.
        on_placed: is told the nodes of their places.

    Raises:
        PlaceError: the actors were not placed in time, or run different code than the driver.
        RingFault: an actor failed while starting.
        StoppedError: ``wait_limits`` say that the ring is not needed any more; so do its methods.
    """

    def __init__(
        self,
        capacity: int,
        placement: Placement,
        timeout: float,
        wait_limits: WaitLimits,
        avoid: Sequence[str] = (),
        on_placed: Callable[[Sequence[str]], None] = lambda nodes: None,
    ) -> None:
        self.capacity = capacity
        self.placement = placement
        self.size = 0
        self._timeout, self._stop = timeout, wait_limits.stop
        self._started = False  # ranks answer questions
        self._address: tuple[str, int] | None = None
        self._actors: list[Any] = []  # in the order of the bundles
        self._along: list[int] = []  # which of them the ranks of the ring are
        self._orders: dict[tuple[int, str, int, int], list[int]] = {}
        elsewhere = {"ray.io/node-id": f"!in({', '.join(avoid)})"}
        bundles = [dict(placement.bundle) for _ in range(capacity)]
        labels = [elsewhere] * capacity if avoid else None
        self._group = placement_group(bundles, placement.strategy, bundle_label_selector=labels)
        try:
            placement_wait.wait(self._group, capacity, dict(placement.bundle), wait_limits)
            self._where = _places(self._group)
            on_placed([where.node for where in self._where])
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Starts an actor in each bundle and checks that it runs this driver's code."""
        resources = dict(self.placement.bundle)
        actor = ray.remote(concurrency_groups={BESIDE: 1})(Rank)
        needs = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)}
        for where in self._where:
            place = PlacementGroupSchedulingStrategy(self._group, where.bundle)
            started = actor.options(**needs, scheduling_strategy=place)
            self._actors.append(started.remote(self.placement.device, self.placement.memory))
        self.ranks: list[RankInfo] = self._all("introduce", START_TIMEOUT)
        self._started = True
        self._where = [
            replace(where, gpu=rank.gpu, links=rank.gpu_links, log=rank.log)
            for where, rank in zip(self._where, self.ranks, strict=True)
        ]
        check(self._where)
        others = sorted({rank.address for rank in self.ranks if rank.code != code_digest()})
        if others:
            raise PlaceError(
                f"workers on {', '.join(others)} run different code than this driver; "
                "install the same everywhere, or let `ringray submit` send it as a job; if it "
                "was edited just now, run again"
            )
        if mixed := mixed_versions(self.ranks, versions()["torch"]):
            raise PlaceError(mixed)

    def form(self, size: int, order: str = "topology", inner: int = 1, seed: int = 0) -> None:
        """Makes ``size`` actors one process group, unless they are, in an order as
        ``order.ordered`` finds it; a ring of one needs none."""
        assert 1 <= size <= self.capacity
        how = (size, order, inner, seed)
        if how not in self._orders:
            self._orders[how] = ordered(self._where, *how)
        along = self._orders[how]
        if size == self.size and along[:size] == self._along:
            return
        self.size = 0
        self._all("leave", self._timeout)
        if size > 1:
            patience = self._timeout + LATER_S
            if self._address is None:
                hosting = [self._actors[0].host_store.remote(patience)]
                self._address = self._call(hosting, self._timeout)[0]
            generation = next(_generations)
            joining = [
                self._actors[actor].join.remote(self._address, rank, size, generation, patience)
                for rank, actor in enumerate(along[:size])
            ]
            self._call(joining, self._timeout, along=along)
        self.size, self._along = size, along[:size]

    def run(
        self, kind: TrialKind, config: TrialConfig, timeout: float, watch: Watch | None = None
    ) -> list[RankReport]:
        """Runs one trial on all ranks of the ring; it counts only if every rank reports. ``watch``
        is called every few seconds with the progress of rank 0.

        Raises:
            RingFault: a rank died, failed or took longer than ``timeout`` seconds. Close the ring,
                unless the fault is sound.
        """
        flat = config.as_dict()
        try:
            calls = [self._actors[actor].run.remote(kind, flat) for actor in self._along]
            return self._call(calls, timeout, watch, self._along)
        except RingFault:
            self.size = 0  # messages may be under way in its group
            raise

    @property
    def nodes(self) -> list[str]:
        """Returns Ray's ids of the nodes by rank."""
        return [self._where[actor].node for actor in self._along]

    @property
    def place(self) -> Place:
        """Returns the place for which tuned choices hold; it names the hardware of all ranks."""
        places = [self.ranks[actor].place for actor in self._along]
        hardware = " and ".join(sorted({place.hardware for place in places}))
        return replace(places[0], hardware=hardware)

    def settle(self, config: TrialConfig, kind: TrialKind) -> tuple[TrialConfig, dict[str, Any]]:
        """Returns ``config`` with every open choice made, the same for all ranks; and the choices
        with their ``source``, empty if there is none but a default for the blocks."""
        if kind.independent_ranks:  # it is about to be tuned
            return config, {}
        if kind.trains:
            settled, source = training.settled(config, self.place)
        else:
            settled, source = resolved(config, self.place)
        if settled == config:
            return config, {}
        return settled, {**vars(settled.strategy), "source": source}

    def close(self) -> None:
        """Kills all actors and gives the placement group back; raises nothing if Ray is gone."""

        def end(actors: list[Any]) -> None:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(self._group)

        actors, self._actors = self._actors, []
        with suppress(TimeoutError):
            within(CLOSE_S, "the end of a ring", end, actors)

    def _all(self, method: str, timeout: float) -> list[Any]:
        return self._call([getattr(a, method).remote() for a in self._actors], timeout)

    def _call(
        self,
        references: Sequence[Any],
        timeout: float,
        watch: Watch | None = None,
        along: Sequence[int] | None = None,
    ) -> list[Any]:
        """Returns results by rank; the first failure of any rank ends the wait. ``along``: which
        actors the ranks are; None: all, in their own order."""
        who = range(len(self._actors)) if along is None else along
        actors = [self._actors[actor] for actor in who]
        where = [self._where[actor] for actor in who]
        calls = RankCalls(actors, where, references, self._started)
        return RankMonitor(calls, timeout, self._stop, watch).answers()


def mixed_versions(ranks: Sequence[RankInfo], driver: str | None) -> str | None:
    """Returns the error of a ring whose ranks have different versions of torch or triton, or
    another torch than the ``driver``, whose version the records name; None for a sound ring."""
    by_address = {
        rank.address: f"torch {rank.place.torch}, triton {rank.place.triton}" for rank in ranks
    }
    # Builds for a CPU and for GPUs differ behind the +.
    torches = {str(torch).partition("+")[0] for torch in (ranks[0].place.torch, driver) if torch}
    if len(torches) == len(set(by_address.values())) == 1:
        return None
    each = "; ".join(f"{address} has {version}" for address, version in by_address.items())
    return (
        f"a ring needs one version of torch and triton everywhere: {each}; this driver has torch "
        f"{driver}; install those of constraints.txt on every node"
    )


def _places(group: Any) -> list[RankLocation]:
    """Returns the places of the ranks, in the order of the bundles."""
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    places = []
    for bundle, node in sorted(placement_group_table(group)["bundles_to_node_id"].items()):
        facts = nodes.get(node, {})
        name = f"{facts.get('NodeManagerAddress', 'an unknown host')} (node {node[:8]})"
        zones = zones_of(facts.get("Labels") or {})
        places.append(RankLocation(node, zones, name=name, bundle=bundle))
    return places
