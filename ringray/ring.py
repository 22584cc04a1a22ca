"""A ring: actors that are placed, joined, run and killed as one unit.

A placement group and its actors live and die together. Any fault ends the whole generation: peers
of a dead or stalled rank may be stuck inside a hop, and no message of theirs can be trusted.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ringray import choose, placing
from ringray.environment import code_digest
from ringray.errors import PlaceError, RingrayError
from ringray.kinds import ALONE
from ringray.worker import Rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringray.measure import Report
    from ringray.placing import Patience
    from ringray.plan import Config
    from ringray.worker import Introduction

START_TIMEOUT = 120.0  # seconds for actors to start and import torch

_generations = itertools.count(1)


class RingFault(RingrayError):
    """A ring ended in mid-trial. ``kind``: died (worth another try), timeout, oom or error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Placement:
    """What every rank of a ring needs. ``device``: cpu or cuda; ``bundle``: Ray resources."""

    device: str
    threads: int
    strategy: str
    bundle: tuple[tuple[str, float], ...]


class Ring:
    """``capacity`` warm actors, of which the first ``size`` form the process group.

    ``timeout``: seconds for one operation among them; ``patience``: for their place.

    Raises:
        PlaceError: the actors could not be placed in time, or run other code than the driver.
        RingFault: an actor failed while starting.
    """

    def __init__(
        self, capacity: int, placement: Placement, timeout: float, patience: Patience
    ) -> None:
        self.capacity = capacity
        self.placement = placement
        self.size = 0
        self._timeout = timeout
        self._address: tuple[str, int] | None = None
        self._actors: list[Any] = []
        self._group = placement_group(
            [dict(placement.bundle)] * capacity, strategy=placement.strategy
        )
        try:
            placing.wait(self._group, capacity, dict(placement.bundle), patience)
            self._start()
            self.ranks: list[Introduction] = self._all("introduce", START_TIMEOUT)
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
        actor = ray.remote(Rank)
        self._actors = [
            actor.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=i
                ),
            ).remote(self.placement.device, self.placement.threads)
            for i in range(self.capacity)
        ]

    def form(self, size: int) -> None:
        """Make the first ``size`` actors one process group; a ring of one needs none."""
        assert 1 <= size <= self.capacity
        if size == self.size:
            return
        self._all("leave", self._timeout)
        if size > 1:
            if self._address is None:
                hosted = self._call(
                    [self._actors[0].host_store.remote(self._timeout)], self._timeout
                )
                self._address = hosted[0]
            generation = next(_generations)
            joining = [
                actor.join.remote(self._address, rank, size, generation, self._timeout)
                for rank, actor in enumerate(self._actors[:size])
            ]
            self._call(joining, self._timeout)
        self.size = size

    def run(self, kind: str, config: Config, timeout: float) -> list[Report]:
        """One trial on all ranks of the ring; it counts only when every rank has reported.

        Raises:
            RingFault: a rank died, failed or took longer than ``timeout`` seconds. The ring is of
                no use afterwards: close it.
        """
        flat = config.as_dict()
        return self._call([a.run.remote(kind, flat) for a in self._actors[: self.size]], timeout)

    def settle(self, config: Config, kind: str) -> tuple[Config, dict[str, Any]]:
        """``config`` with every choice made that it leaves open, the same for all ranks; and what
        was chosen, if anything but a default for the blocks, with its ``source``."""
        if kind in ALONE:  # it is about to be tuned
            return config, {}
        places = {rank.place for rank in self.ranks[: self.size]}
        place = self.ranks[0].place
        if len(places) > 1:  # nothing was tuned on such a ring
            place = replace(place, hardware=" and ".join(sorted({p.hardware for p in places})))
        settled, source = choose.of_config(config, place)
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
        deadline = time.monotonic() + timeout
        pending = list(references)
        while pending:
            left = max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=left)
            if not done:
                stuck = [rank for rank, ref in enumerate(references) if ref in pending]
                raise RingFault(
                    "timeout", f"no answer after {timeout:g} s from rank(s) {_list(stuck)}"
                )
            for reference in done:
                _check(reference, references.index(reference))
        return list(ray.get(list(references)))


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")


def _check(reference: Any, rank: int) -> None:
    """RingFault if the rank that was to answer ``reference`` failed."""
    try:
        ray.get(reference, timeout=0)
    except RayTaskError as error:
        cause = error.cause if error.cause is not None else error
        text = f"{type(cause).__name__}: {cause}"
        raise RingFault(_fault_kind(cause), f"rank {rank}: {text}") from error
    except GetTimeoutError:
        raise
    except RayError as error:
        raise RingFault("died", f"rank {rank}: {_first_line(error)}") from error


def _fault_kind(cause: BaseException) -> str:
    """Memory is a result; broken connections mean that a peer died; the rest is an error."""
    text = str(cause).lower()
    if (
        type(cause).__name__ in ("OutOfMemoryError", "MemoryError")
        or "can't allocate memory" in text
    ):
        return "oom"
    if type(cause).__name__.startswith("Dist") or "connection" in text or "timed out" in text:
        return "died"
    return "error"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
