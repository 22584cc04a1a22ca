"""A ring: actors that are placed, joined, run and killed as one unit.

A placement group and its actors live and die together. Any fault ends the whole generation: peers
of a dead or stalled rank may be stuck inside a hop, and no message of theirs can be trusted. Only
where every rank has answered, as after a lack of memory on which they agreed, may they go on.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ringray.base.errors import PlaceError
from ringray.base.provenance import code_digest
from ringray.lab.cluster import placement_wait
from ringray.lab.cluster.capacity import Placement
from ringray.lab.kinds import KINDS
from ringray.lab.ring.actor import Rank
from ringray.lab.ring.monitor import BESIDE, RankMonitor, RingFault, Where
from ringray.lab.trial.config import resolved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray.lab.cluster.placement_wait import Patience
    from ringray.lab.ring.actor import Introduction
    from ringray.lab.trial.config import TrialConfig
    from ringray.lab.trial.measurement import RankReport
    from ringray.tuning.table import Place

START_TIMEOUT = 120.0  # seconds for actors to start and import torch
LATER_S = 30.0  # by how much process groups are more patient than the driver, who knows more

_generations = itertools.count(1)


class ActorRing:
    """``capacity`` warm actors, of which the first ``size`` form the process group.

    ``timeout``: seconds for one operation among them; ``patience``: for their place; ``avoid``:
    Ray's ids of nodes that get none of them.

    Raises:
        PlaceError: the actors could not be placed in time, or run other code than the driver.
        RingFault: an actor failed while starting.
        StoppedError: nobody needs the ring any more, as ``patience`` says; so do its methods.
    """

    def __init__(
        self,
        capacity: int,
        placement: Placement,
        timeout: float,
        patience: Patience,
        avoid: Sequence[str] = (),
    ) -> None:
        self.capacity = capacity
        self.placement = placement
        self.size = 0
        self._timeout, self._stop = timeout, patience.stop
        self._started = False  # ranks can be asked how they are
        self._address: tuple[str, int] | None = None
        self._actors: list[Any] = []
        self._where: list[Where] = []
        elsewhere = {"ray.io/node-id": f"!in({', '.join(avoid)})"}
        self._group = placement_group(
            [dict(placement.bundle)] * capacity,
            strategy=placement.strategy,
            bundle_label_selector=[elsewhere] * capacity if avoid else None,
        )
        try:
            placement_wait.wait(self._group, capacity, dict(placement.bundle), patience)
            self._where = _places(self._group, capacity)
            self._start()
            self.ranks: list[Introduction] = self._all("introduce", START_TIMEOUT)
            self._started = True
            self._where = [
                replace(at, log=rank.log) for at, rank in zip(self._where, self.ranks, strict=True)
            ]
            others = sorted({r.address for r in self.ranks if r.code != code_digest()})
            if others:
                raise PlaceError(
                    f"workers on {', '.join(others)} import other code than this driver; "
                    "install the same everywhere, or let `ringray submit` send it as a job; if it "
                    "was edited just now, run again"
                )
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        resources = dict(self.placement.bundle)
        # Whoever asks how it goes is answered beside the work.
        actor = ray.remote(concurrency_groups={BESIDE: 1})(Rank)
        self._actors = [
            actor.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=i
                ),
            ).remote(self.placement.device, self.placement.memory)
            for i in range(self.capacity)
        ]

    def form(self, size: int) -> None:
        """Make the first ``size`` actors one process group; a ring of one needs none."""
        assert 1 <= size <= self.capacity
        if size == self.size:
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
                actor.join.remote(self._address, rank, size, generation, patience)
                for rank, actor in enumerate(self._actors[:size])
            ]
            self._call(joining, self._timeout)
        self.size = size

    def run(self, kind: str, config: TrialConfig, timeout: float) -> list[RankReport]:
        """One trial on all ranks of the ring; it counts only when every rank has reported.

        Raises:
            RingFault: a rank died, failed or took longer than ``timeout`` seconds. Unless the fault
                is sound the ring is of no use afterwards: close it.
        """
        flat = config.as_dict()
        try:
            calls = [a.run.remote(kind, flat) for a in self._actors[: self.size]]
            return self._call(calls, timeout)
        except RingFault:
            self.size = 0  # messages may be under way in its group
            raise

    @property
    def nodes(self) -> set[str]:
        """Ray's ids of the nodes that the ring is on."""
        return {at.node_id for at in self._where[: self.size]}

    @property
    def place(self) -> Place:
        """Where tuned choices hold for it; of ranks that differ the hardware of all."""
        places = [rank.place for rank in self.ranks[: self.size]]
        hardware = " and ".join(sorted({place.hardware for place in places}))
        return replace(places[0], hardware=hardware)

    def settle(self, config: TrialConfig, kind: str) -> tuple[TrialConfig, dict[str, Any]]:
        """``config`` with every choice made that it leaves open, the same for all ranks; and what
        was chosen, if anything but a default for the blocks, with its ``source``."""
        if KINDS[kind].ranks_alone:  # it is about to be tuned
            return config, {}
        settled, source = resolved(config, self.place)
        if settled == config:
            return config, {}
        names = ("partition", "transport", "backward", "blocks")
        return settled, {**{name: getattr(settled, name) for name in names}, "source": source}

    def close(self) -> None:
        """Kill all actors and give the placement group back; never raises."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        remove_placement_group(self._group)

    def _all(self, method: str, timeout: float) -> list[Any]:
        return self._call([getattr(a, method).remote() for a in self._actors], timeout)

    def _call(self, references: Sequence[Any], timeout: float) -> list[Any]:
        """Results by rank; the first failure of any rank ends the wait."""
        vigil = RankMonitor(self._actors, self._where, timeout, self._started, self._stop)
        return vigil.answers(references)


def _places(group: Any, capacity: int) -> list[Where]:
    """Where the bundles of a placement group are, for people and for Ray."""
    ids = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [
        Where(f"{addresses.get(ids[i], 'an unknown host')} (node {ids[i][:8]})", ids[i])
        for i in range(capacity)
    ]
