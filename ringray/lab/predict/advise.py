"""Advice: the degrees DP x CP x TP x PP, and the ring, that train a model fastest on a fleet.

All degrees that multiply out are listed with a lower bound of their step; in that order the
attention of each is predicted with every transport, until the bounds are above the best found.
Partitions and walks back are compared where ranks wait for messages. Of proposals that are equally
fast, that with most room in memory comes first.
"""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ringray import partition, transport
from ringray.base.errors import UserError
from ringray.lab.predict import layers, layouts, long_ring, rank_memory, rates, transformer
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Direction, Fleet
from ringray.lab.predict.layouts import TrainingRequest
from ringray.lab.predict.rank_memory import RankMemory, Training
from ringray.lab.predict.transformer import StepTime
from ringray.lab.trial.config import TrialConfig
from ringray.traffic.walk import BACKWARDS
from ringray.training.recipe import Degrees

# Of a step. Of published strategies on the same devices that are predicted to differ by less, a
# third is in the other order; by more, 4% (experiments/published/run.py).
EQUAL = 0.03
_GAIN = 0.005  # of the step; if less is lost, nothing is gained by other transports and walks
_MATTERS = 0.1  # of the step, from which a loss limits it


class Proposal(NamedTuple):
    """One way to train. ``config``: the attention of one ring; ``both``: its cost. ``room``: bytes
    of memory that nothing needs. ``slower``: of its time over that of the fastest way, less 1."""

    degrees: Degrees
    training: Training
    config: TrialConfig
    both: Cost
    memory: RankMemory
    time: StepTime
    room: float
    slower: float = 0.0

    def mfu(self, request: TrainingRequest, flops: float) -> float:
        """Returns model FLOPs utilization; ``flops``: of one sequence, forward."""
        on = request.on
        devices = on.nodes * min(on.per_node, on.hardware.cores or on.per_node)
        peak = on.hardware.peak[request.dtype] * devices
        return 3 * flops * request.sequences / (self.time.total * peak)

    def limit(self, on: Fleet) -> str:
        """Returns what takes most of the time beside useful computation, else compute."""
        near, far = "within nodes", "between nodes"
        losses = {
            "activations are computed again": self.time.again,
            f"messages of the ring {far if self.both.outer_bytes else near}": self.time.ring,
            f"messages of TP {near}": self.time.tensor,
            "messages to experts": self.time.experts,
            f"shards of weights {far if on.nodes > 1 else near}": self.time.shards,
            "stages that wait for others": self.time.pipeline,
            "copies of layers' inputs": self.time.offload,
        }
        largest = max(losses, key=losses.__getitem__)
        return largest if losses[largest] > _MATTERS * self.time.total else "compute"


def _fitting(request: TrainingRequest, degrees: Degrees, config: TrialConfig) -> list[Proposal]:
    """Lists the ways to keep activations, and to deal experts, that fit into memory."""
    both, exchanged = request.cost(degrees, config), transformer.exchanged(config)
    proposals: list[Proposal] = []
    for way, ep in itertools.product((*layouts.WAYS, layouts.AWAY), request.expert_ranks(degrees)):
        if way is layouts.AWAY and proposals and not proposals[0].training.offload:
            break
        training = replace(request.training(way), exchanged=exchanged)
        dealt = replace(degrees, ep=ep)
        memory = rank_memory.memory(request.model, dealt, training, both.peak_memory_bytes)
        room = request.room(dealt, training, memory)
        if room >= 0:
            forward = request.cost(degrees, config.changed(direction="forward"))
            time = transformer.step(request.model, dealt, training, request.on, forward, both)
            proposals.append(Proposal(dealt, training, config, both, memory, time, room))
    return proposals


def _exchanges(request: TrainingRequest, degrees: Degrees) -> list[str]:
    """Lists the transports that fit, those with short walks first, as these are predicted fast.
    Their number, if they need one, is the size of a node's part of the ring."""
    part = min(degrees.cp, max(1, request.on.per_node // degrees.tp))
    rings = layers.rings(request.model, request.attention(degrees), degrees.tp)
    by_kind = [(ring.problem.heads, ring.problem.kv_heads) for _, ring in rings]
    folds = {}
    for name, entry in transport.TRANSPORTS.items():
        text = {"name": name, "divisors": f"{name}:{part}"}.get(entry.searched)
        with suppress(ValueError):  # does not fit
            if text and (text == name or 1 < part < degrees.cp):
                plans = [transport.plan(text, degrees.cp, *heads) for heads in by_kind]
                folds[text] = plans[0].fold
    return sorted(folds, key=lambda text: -folds[text])


def _carried(request: TrainingRequest, degrees: Degrees) -> Proposal | None:
    """Returns the proposal with the best transport, None if none fits into memory; tries more only
    while there is something to gain."""
    config, best = request.attention(degrees), None
    for name in _exchanges(request, degrees):
        fitting = _fitting(request, degrees, config.changed(transport=name))
        best = min([*filter(None, [best]), *fitting], key=_seconds, default=None)
        if best and best.time.ring + best.time.again < _GAIN * _seconds(best):
            break
    return best


def _walks(request: TrainingRequest, best: Proposal) -> Proposal:
    """Returns the best of all partitions, and then of all walks back, where ranks wait."""
    if best.time.ring < _GAIN * _seconds(best):
        return best
    choices: list[dict[str, Any]] = [{"partition": name} for name in partition.PARTITIONS]
    for chosen in [*choices, *({"backward": name} for name in BACKWARDS)]:
        with suppress(ValueError):  # this transport has no such walk back
            config = best.config.changed(**chosen)
            best = min(best, *_fitting(request, best.degrees, config), key=_seconds)
    return best


def _seconds(proposal: Proposal) -> float:
    return proposal.time.total


def _bound(request: TrainingRequest, degrees: Degrees) -> float:
    """Returns seconds that a step takes at least: attention at its highest rate, no message of the
    ring is waited for, nothing is computed again."""
    costs = []
    for count, config in layers.rings(request.model, request.attention(degrees), degrees.tp):
        ms = 1e3 * _least_s(request, config) / degrees.cp
        costs.append((count, Cost(0, 0, 0, 0, ms, 1.0, ms, ms, 0.0, 0, 0)))
    free, training = layers.mean_cost(costs), request.training(layouts.WAYS[0])
    dealt = (replace(degrees, ep=ep) for ep in request.expert_ranks(degrees))
    return min(
        transformer.step(request.model, some, training, request.on, free, free).total
        for some in dealt
    )


def _least_s(request: TrainingRequest, config: TrialConfig) -> float:
    """Returns seconds of the attention of one layer on one rank at the highest rates."""
    problem, per_flops = config.problem, 0.0
    ways: tuple[tuple[Direction, int], ...] = (("forward", 2), ("backward", 5))
    for direction, factor in ways:
        rate = rates.of_problem(request.on.hardware, problem, direction)
        curves = (rate.full, rate.causal, rate.windowed)
        per_flops += factor / max(some.max() for some in curves if some is not None)
    return problem.visible * (problem.head_dim + problem.value_dim) * problem.heads * per_flops


def advise(request: TrainingRequest, top: int = 3) -> list[Proposal]:
    """Returns the ``top`` fastest proposals of different degrees; those within ``EQUAL`` of the
    fastest come first, by their room in memory.

    Raises:
        UserError: degrees do not multiply out, or nothing fits into memory.
    """
    bounds = {degrees: _bound(request, degrees) for degrees in layouts.possible(request)}
    fastest: list[float] = []  # seconds, of each of the degrees so far
    every: list[Proposal] = []
    for degrees in sorted(bounds, key=bounds.__getitem__):
        last = math.inf
        if len(fastest) >= top:
            last = max(fastest[top - 1], (1 + EQUAL) * fastest[0])
        if bounds[degrees] > last:
            break
        if layouts.least(request, degrees, 0).room < 0:
            continue
        best = _carried(request, degrees)
        if best and _seconds(best) - best.time.ring < last:
            best = _walks(request, best)
            every += _fitting(request, degrees, best.config)
            fastest = sorted([*fastest, _seconds(best)])
    if not every:
        raise layouts.too_large(request)
    return _ranked(every)[:top]


def _ranked(every: list[Proposal]) -> list[Proposal]:
    """Returns the best proposal of each layout, in order."""
    least = min(map(_seconds, every))

    def rank(proposal: Proposal) -> tuple[bool, float, float]:
        equal = proposal.slower <= EQUAL
        return not equal, -proposal.room if equal else proposal.slower, proposal.slower

    ranked: dict[Degrees, Proposal] = {}
    compared = (proposal._replace(slower=_seconds(proposal) / least - 1) for proposal in every)
    for proposal in sorted(compared, key=rank):
        ranked.setdefault(replace(proposal.degrees, ep=1), proposal)
    return [*ranked.values()]


def assumptions(request: TrainingRequest, proposal: Proposal) -> list[str]:
    """Returns what a proposal takes for granted, as sentences."""
    lines = request.assumptions(proposal.degrees, proposal.training)
    on = transformer.around(request.on, proposal.degrees)
    if short := long_ring.shorter(proposal.config, on):
        lines.append(
            f"each further rank of a ring takes as long as the last {short} of {2 * short} do"
        )
    return lines


def smallest_ring(request: TrainingRequest) -> Proposal:
    """Returns the fastest proposal with the smallest CP that fits; CP 1 is no ring."""
    for cp in sorted({degrees.cp for degrees in layouts.possible(request)}):
        with suppress(UserError):  # does not fit
            return advise(replace(request, fixed={**request.fixed, "cp": cp}), 1)[0]
    raise layouts.too_large(request)
