"""Simulation of one pass: each rank's computation and each port's messages, step by step.

The events are those of ``traffic.script``, read for all ranks at once from the tables that it is
written from. A rank computes at a step with the chunks at hand, then waits for the messages that
are due, and posts the next. A message begins when both ends have posted it and their ports are
free; within a node it takes a port of each end, between nodes the network port of each, which
several ranks may share. Imports numpy only.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringray.instruments.hops import Span
from ringray.lab.predict.hardware import Fleet
from ringray.traffic.hulls import Pass, Traffic, Weights

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class PassWork(NamedTuple):
    """One pass: its messages, the bytes of a row of them, FLOPs of a visible pair, and the element
    type and head dim of its calls."""

    which: Pass
    moved: Traffic
    weights: Weights
    pair_flops: int
    dtype: str
    head_dim: int


class RingRanks(NamedTuple):
    """The ranks of a ring, with so many ``threads`` each, and those whose timelines are wanted."""

    fleet: Fleet
    threads: int = 1
    record: Sequence[int] = ()


class Finished(NamedTuple):
    """The end of one pass. ``ended``: seconds by rank. ``computed``: the same without waits for
    messages. ``outer_bytes``: sent between nodes. ``spans``: timelines of the ranks that were
    asked for."""

    ended: Floats
    computed: Floats
    outer_bytes: float
    spans: dict[int, list[Span]]


class _Messages(NamedTuple):
    """Messages of one part that begin at one step and end at ``due``: one of each owner that has
    rows, from rank ``source`` to rank ``to``."""

    due: int
    what: str
    owner: Ints
    source: Ints
    to: Ints
    sizes: Floats


class Ports:
    """The ports of all ranks, and the moments at which they are free.

    Each rank of the ring stands for ``stride`` ranks of the machine that do the same at the same
    time; they share the network ports of their node.
    """

    def __init__(self, fleet: Fleet, ranks: int) -> None:
        first = np.array([fleet.place(rank) for rank in range(ranks)])
        outer, hardware = fleet.hardware.outer, fleet.hardware
        self._node = first // fleet.per_node
        shared = min(outer.ranks, fleet.per_node)  # ranks of a network port
        self._port = first // shared if fleet.stride < shared else np.arange(ranks)
        crowd = min(fleet.stride, shared)
        self._inner, self._outer = hardware.inner, outer
        self._outer_bandwidth = outer.bandwidth / crowd
        # Out and in of ranks, out and in of network ports.
        self._free = np.zeros((4, ranks))
        self.outer_bytes = 0.0

    def send(self, source: Ints, to: Ints, sizes: Floats, ready: Floats) -> Floats:
        """Returns the moments at which messages that are ``ready`` have arrived."""
        crosses = self._node[source] != self._node[to]
        if not crosses.any():
            return self._within(source, to, sizes, ready)
        arrived = np.empty_like(ready)
        for some, send in ((~crosses, self._within), (crosses, self._between)):
            if some.any():
                arrived[some] = send(source[some], to[some], sizes[some], ready[some])
        return arrived

    def _within(self, source: Ints, to: Ints, sizes: Floats, ready: Floats) -> Floats:
        out, into = self._free[:2]
        end = np.maximum(np.maximum(ready, out[source]), into[to]) + sizes / self._inner.bandwidth
        np.maximum.at(out, source, end)
        np.maximum.at(into, to, end)
        return end + self._inner.latency

    def _between(self, source: Ints, to: Ints, sizes: Floats, ready: Floats) -> Floats:
        """Messages that share a port arrive together: as late as one after the other."""
        out, into = self._free[2:]
        seconds, ranks = sizes / self._outer_bandwidth, len(out)
        leaving, entering = self._port[source], self._port[to]
        end = ready + seconds
        for free, port in ((out, leaving), (into, entering)):
            begin = free.copy()
            np.maximum.at(begin, port, ready)
            all_of = np.bincount(port, seconds, ranks)
            end = np.maximum(end, (begin + all_of)[port])
        np.maximum.at(out, leaving, end)
        np.maximum.at(into, entering, end)
        self.outer_bytes += float(sizes.sum())
        return end + self._outer.latency


def slowness(fleet: Fleet, ranks: int, steps: int) -> Floats:
    """Returns the factors of all computations, ``[rank, step]``."""
    noise = fleet.noise
    if noise is None:
        return np.ones((1, 1))
    drawn = np.random.default_rng(noise.seed).normal(0.0, 1.0, (ranks, steps))
    noisy: Floats = np.exp(noise.jitter * drawn)
    slow = np.ones(ranks)
    for rank, factor in noise.slow.items():  # all ranks of a group wait for its slowest
        group = rank // fleet.stride % ranks
        slow[group] = max(slow[group], factor)
    return noisy * slow[:, None]


class Cores:
    """The cores of each node, which its ranks share: while more ranks compute than there are cores,
    all become slower alike. ``per_rank``: cores that one computes on."""

    def __init__(self, fleet: Fleet, ranks: int, per_rank: int = 1) -> None:
        hardware = fleet.hardware
        node = np.array([fleet.node(rank) for rank in range(ranks)])
        nodes = [np.nonzero(node == number)[0] for number in range(node.max() + 1)]
        together = min(fleet.stride, fleet.per_node) * fleet.rings  # ranks that do the same
        self._taken = per_rank * together / (hardware.cores or math.inf)
        # How much slower the ranks of a node are until the first of them ends, the second, ...
        self._slower = [
            (ranks, np.maximum(1.0, np.arange(len(ranks), 0, -1) * self._taken)) for ranks in nodes
        ]
        self._message, self._byte = hardware.message / 2, hardware.copying / 2

    def elapsed(self, seconds: Floats) -> Floats:
        """Returns the moments at which ranks that begin together end their ``seconds`` of work."""
        if len(seconds) * self._taken <= 1:
            return seconds
        ends = np.empty_like(seconds)
        for ranks, slower in self._slower:
            by_end = ranks[seconds[ranks].argsort()]
            parts = seconds[by_end]  # becomes the work between the ends of two ranks
            parts[1:] -= parts[:-1].copy()
            ends[by_end] = (parts * slower).cumsum()
        return ends

    def handling(self, ranks: int, messages: Iterable[_Messages], parts: int) -> Floats:
        """Returns the seconds in which ranks send and receive ``messages``, each in some parts."""
        seconds = np.zeros(ranks)
        if self._message or self._byte:
            for message in messages:
                work = self._message * parts + message.sizes * self._byte
                np.add.at(seconds, message.source, work)
                np.add.at(seconds, message.to, work)
        return seconds


def simulate(
    work: PassWork, seconds: Floats, ring: RingRanks, began: Floats | None = None, parts: int = 1
) -> Finished:
    """Returns the end of one pass.

    ``seconds``: of each computation, ``[rank, visit]``. ``began``: by rank, the start of the pass.
    ``parts``: of each message.
    """
    moved, which, fleet = work.moved, work.which, ring.fleet
    route, step_of = moved.route, np.array(moved.route.step)
    ranks, steps = route.ranks, moved.steps(which)
    groups = _groups(moved, which)
    computing = np.zeros((steps, ranks))
    np.add.at(computing, step_of, seconds.T)
    # Half of the own chunk is kept for the last step, in which the last sums come home.
    if which == "backward":
        half = seconds[:, 0] / 2
        computing[step_of[0]] -= half
        computing[-1] += half
    computing *= slowness(fleet, ranks, steps).T
    ports, cores = Ports(fleet, ranks), Cores(fleet, ranks, ring.threads)
    now = np.zeros(ranks) if began is None else began
    arrivals, total = np.zeros((steps, ranks)), np.zeros(ranks)
    recorder = _Recorder(moved, which, ring.record)
    for step in range(steps):
        messages = [_messages(moved, group, work.weights) for group in groups.get(step, ())]
        for message in messages:
            ready = np.maximum(now[message.source], now[message.to])
            arrived = ports.send(message.source, message.to, message.sizes, ready)
            np.maximum.at(arrivals[message.due], message.source, arrived)
            np.maximum.at(arrivals[message.due], message.to, arrived)
            recorder.messages(step, message, now)
        busy = computing[step] + cores.handling(ranks, messages, parts)
        computed = now + cores.elapsed(busy + fleet.hardware.step * (steps > 1))
        after = np.maximum(computed, arrivals[step])
        recorder.step(step, computing[step], now, computed, after)
        total, now = total + computed - now, after
    return Finished(now, total, ports.outer_bytes, recorder.spans)


class _VisitGroup(NamedTuple):
    """The messages to or from one visit of a part of all chunks, from the step that lists them
    to the end of step ``due``."""

    due: int
    what: Literal["chunk", "sum"]
    part: int
    visit: int


@lru_cache(maxsize=8)
def _groups(moved: Traffic, which: Pass) -> dict[int, list[_VisitGroup]]:
    """Returns the groups that have messages, by the step at which they begin."""
    route = moved.route
    groups: defaultdict[int, list[_VisitGroup]] = defaultdict(list)
    visits = enumerate(zip(route.step, route.posted, strict=True))
    for part, (visit, (step, posted)) in itertools.product(range(len(moved.chunk_rows)), visits):
        if moved.chunk_rows[part, :, visit].any():
            groups[posted].append(_VisitGroup(step - 1, "chunk", part, visit))
        if which == "backward" and moved.sum_rows[part, :, visit].any():
            groups[step + 1].append(_VisitGroup(step + 1, "sum", part, visit))
    return groups


def _messages(moved: Traffic, group: _VisitGroup, weights: Weights) -> _Messages:
    """Returns the messages of one group: those of the owners that have rows."""
    part, visit, rank = group.part, group.visit, moved.route.rank[:, group.visit]
    if group.what == "chunk":
        rows, source, to = moved.chunk_rows[part, :, visit], moved.route.handed_by[:, visit], rank
        weight = weights.chunk
    else:
        rows, source, to = moved.sum_rows[part, :, visit], rank, moved.sums_to[part, :, visit]
        weight = weights.sums
    (owner,) = rows.nonzero()
    sizes = rows[owner].astype(np.float64) * weight
    return _Messages(group.due, group.what, owner, source[owner], to[owner], sizes)


class _Recorder:
    """Timelines of a few ranks, as ``instruments.timeline`` records them."""

    def __init__(self, moved: Traffic, which: Pass, ranks: Sequence[int]) -> None:
        self._which, self._route = which, moved.route
        self._under_way: defaultdict[tuple[int, int], list[_Flight]] = defaultdict(list)
        self.spans: dict[int, list[Span]] = {rank: [] for rank in ranks}

    def messages(self, step: int, message: _Messages, now: Floats) -> None:
        """Notes the messages of the ranks that begin at ``step``."""
        for rank in self.spans:
            ends = message.source, message.to
            for mine, others, word in ((*ends, "to"), (*ends[::-1], "from")):
                for i in np.nonzero(mine == rank)[0]:
                    text = f"{message.what} {message.owner[i]} {word} {others[i]}"
                    sent, size = word == "to", int(message.sizes[i])
                    flight = _Flight(step, now[rank], text, size * sent, size * (not sent))
                    self._under_way[rank, message.due].append(flight)

    def step(
        self, step: int, seconds: Floats, began: Floats, computed: Floats, after: Floats
    ) -> None:
        """Notes the computation of a step, the wait after it and the transfers that it ends."""
        for rank, spans in self.spans.items():
            hop, end = f"{self._which}, step {step}", float(after[rank])
            if seconds[rank]:
                visits = np.array(self._route.step) == step
                label = ", ".join(f"chunk {owner}" for owner in self._route.owner[rank, visits])
                ends = float(began[rank]), float(computed[rank])
                spans.append(Span("compute", hop, label or f"chunk {rank}", *ends))
            if end > computed[rank]:
                spans.append(Span("wait", hop, "", float(computed[rank]), end))
            flights = self._under_way.pop((rank, step), [])
            for begins, together in itertools.groupby(flights, lambda flight: flight.begins):
                some = list(together)
                label = ", ".join(flight.text for flight in some)
                sent, received = sum(f.sent for f in some), sum(f.received for f in some)
                name = f"{self._which}, step {begins}"
                start = float(some[0].began)
                spans.append(Span("transfer", name, label, start, end, sent, received))


class _Flight(NamedTuple):
    begins: int
    began: float
    text: str
    sent: int
    received: int
