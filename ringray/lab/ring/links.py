"""Links between the nodes of a cluster: an actor on each, which meet pair by pair.

Pairs that share no node are measured at the same time, each in a process group of its own, so that
a link that is cut fails its own pair only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ringray.base import provenance
from ringray.base.deadline import within
from ringray.base.errors import PlaceError
from ringray.base.units import plural
from ringray.lab.calibrate import machine
from ringray.lab.cluster import ray_private
from ringray.lab.predict.links import ClusterLinks, LinkedNode, NodePair
from ringray.lab.ring.actor import Rank
from ringray.lab.ring.calls import lost
from ringray.lab.ring.group import CLOSE_S, START_TIMEOUT
from ringray.lab.ring.monitor import of_error
from ringray.lab.trial.faults import of_exception

PAIR_S = 0.8  # seconds of the messages of a pair, about
PATIENCE_S = 10.0  # seconds for a connection, or a message
_ROUND_S = 30.0  # seconds for both ends of a pair to answer, which give up before

Samples = list[tuple[int, float]]  # bytes of a hop, and its seconds
Say = Callable[[str], None]


class LinkProbe(Rank):
    """The actor of one node, which meets those of the others one after the other."""

    def open(self) -> tuple[dict[str, Any], tuple[str, int]]:
        """Returns what measurements depend on here, and where others find this node's store."""
        address = self.host_store(PATIENCE_S)
        self._own = self._store
        described = provenance.describe()
        return {name: described[name] for name in ("hardware", "versions", "kernels")}, address

    def meet(
        self, address: tuple[str, int], place: int, number: int, device: str, seconds: float
    ) -> Samples | str:
        """Returns samples of messages with another node, or the reason why there are none.

        ``address``: of the store of the one whose ``place`` is 0; ``number``: of their meeting
        there; ``seconds``: of their messages.
        """
        import torch

        from ringray.comm.ring import connect
        from ringray.lab.calibrate.hops import HopTimer

        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._store = None if place else self._own
        try:
            self.join(address, place, 2, number, PATIENCE_S)
            timer = HopTimer(connect(None), self._device)
            return timer.ends(machine.SIZES[device].hops, seconds)
        except Exception as error:  # of many types, some of which do not unpickle
            return of_exception(error, place).message
        finally:
            with suppress(Exception):  # the other end may be gone
                self.leave()


class LinkSurvey:
    """A probe on each of ``nodes``, as of ``ray.nodes()``. ``say``: takes a line."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], say: Say) -> None:
        self._say, self._ids = say, [node["NodeID"] for node in nodes]
        self._lost = dict[int, str]()
        self._names = [node["NodeManagerAddress"] for node in nodes]
        self._silent = set[int]()  # of the last question
        free = ray_private.free_gpus()
        self._devices = ["cuda" if free.get(node, 0.0) >= 1 else "cpu" for node in self._ids]
        for name, node, device in zip(self._names, nodes, self._devices, strict=True):
            if device == "cpu" and node["Resources"].get("GPU"):
                say(f"{name}: its GPUs are busy, so its CPU sends")
        self._probes = [self._probe(number) for number in range(len(nodes))]

    def _probe(self, number: int) -> Any:
        device = self._devices[number]
        place = NodeAffinitySchedulingStrategy(self._ids[number], soft=False)
        resources = {"num_cpus": 0, "num_gpus": int(device == "cuda")}
        return ray.remote(LinkProbe).options(scheduling_strategy=place, **resources).remote(device)

    def measure(self) -> ClusterLinks:
        """Measures all pairs; raises PlaceError if fewer than two nodes answer."""
        opening = {number: probe.open.remote() for number, probe in enumerate(self._probes)}
        opened = self._answers(opening, START_TIMEOUT)
        if len(opened) < 2:
            raise PlaceError("\n".join(f"{self._names[n]}: {x}" for n, x in self._lost.items()))
        planned = list(rounds(len(self._probes)))
        self._say(f"{plural(len(opened), 'node')} in {plural(len(planned), 'round')} of pairs")
        stores = {number: store for number, (_, store) in opened.items()}
        pairs = [pair for some in planned for pair in self._round(some, stores)]
        nodes = [
            LinkedNode(name=name, environment=opened.get(n, ({},))[0], lost=self._lost.get(n))
            for n, name in enumerate(self._names)
        ]
        pairs.sort(key=lambda pair: pair.nodes)
        measured = datetime.now(UTC).isoformat(timespec="seconds")
        return ClusterLinks(measured=measured, nodes=tuple(nodes), pairs=tuple(pairs))

    def _round(
        self, pairs: Sequence[tuple[int, int]], stores: dict[int, tuple[str, int]]
    ) -> Iterator[NodePair]:
        """Yields the links of pairs that meet at the same time."""
        both = {pair: {self._devices[number] for number in pair} for pair in pairs}
        devices = {pair: "cuda" if types == {"cuda"} else "cpu" for pair, types in both.items()}
        asked = {
            node: self._probes[node].meet.remote(stores[pair[0]], place, pair[1], device, PAIR_S)
            for pair, device in devices.items()
            if not self._lost.keys() & set(pair)
            for place, node in enumerate(pair)
        }
        answers = self._answers(asked, _ROUND_S)
        for pair, device in devices.items():
            ends = [answers.get(node, "the node is lost") for node in pair]
            yield _link(pair, device, ends)
        self._revive(stores)

    def _revive(self, stores: dict[int, tuple[str, int]]) -> None:
        """Replaces the probes that gave no answer, though their nodes are there: torch's client of
        a store whose host was cut may wait for ever."""
        silent = list(self._silent)
        for node in silent:
            ray.kill(self._probes[node])
            del self._lost[node]
            self._probes[node] = self._probe(node)
        opening = {node: self._probes[node].open.remote() for node in silent}
        opened = self._answers(opening, START_TIMEOUT)
        stores.update({node: store for node, (_, store) in opened.items()})

    def _answers(self, asked: Mapping[int, Any], seconds: float) -> dict[int, Any]:
        """Returns the answers by node; one that gives none, or whose actor fails, is lost."""
        self._silent = set()
        references = list(asked.values())
        if references:
            ray.wait(references, num_returns=len(references), timeout=seconds)
        answers = {}
        for node, reference in asked.items():
            try:
                answers[node] = ray.get(reference, timeout=0)
            except RayError as error:
                if lost(lost([self._ids[node]])):  # twice: a busy node may miss one look
                    self._lost[node] = "the node is gone"
                elif isinstance(error, TimeoutError):
                    self._silent.add(node)
                    self._lost[node] = f"it has not answered for {seconds:.0f} s"
                else:
                    self._lost[node] = of_error(error, node, "").message
        return answers

    def close(self) -> None:
        """Ends all probes; raises nothing if Ray is gone."""

        def end() -> None:
            for probe in self._probes:
                ray.kill(probe)

        with suppress(TimeoutError):
            within(CLOSE_S, "the end of the probes", end)


def measure(say: Say) -> ClusterLinks:
    """Measures the links between all nodes of the connected cluster that can hold ranks.

    Raises:
        PlaceError: there are fewer than two, or fewer than two answer.
    """
    there = [node for node in ray.nodes() if node["Alive"]]
    nodes = [node for node in there if any(node["Resources"].get(kind) for kind in ("CPU", "GPU"))]
    if len(nodes) < 2:
        raise PlaceError(
            f"--cluster: the cluster has {plural(len(nodes), 'node')} with CPUs or GPUs, "
            "expected at least 2 between which there is a link"
        )
    nodes.sort(key=lambda node: (len(node["NodeManagerAddress"]), node["NodeManagerAddress"]))
    with closing(LinkSurvey(nodes, say)) as survey:
        return survey.measure()


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yields rounds of pairs of ``count`` nodes: each pair once, each node at most once a round."""
    seats = list(range(count + count % 2))  # opposite the last one, if there is none, a node rests
    for _ in range(len(seats) - 1):
        opposite = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        pairs = [(min(pair), max(pair)) for pair in opposite]
        yield [pair for pair in pairs if pair[1] < count]
        seats[1:] = [seats[-1], *seats[1:-1]]


def _link(pair: tuple[int, int], device: Any, answers: Sequence[Samples | str]) -> NodePair:
    """Returns the link of a pair by what its ends say."""
    samples = [answer for answer in answers if not isinstance(answer, str)]
    if len(samples) < 2:
        why = next(answer for answer in answers if isinstance(answer, str))
        return NodePair(nodes=pair, device=device, error=f"no messages pass: {why}")
    (sizes, clock), (_, other) = (zip(*answer, strict=True) for answer in samples)
    latency, byte = machine.line(sizes, [list(map(max, clock, other))])
    return NodePair(nodes=pair, device=device, bandwidth=1 / byte, latency=latency)
