"""Advice: the degrees DP x CP x TP x PP, and the ring, that train a model fastest on a fleet.

All degrees that multiply out are listed with a lower bound of their step; in that order the
attention of each is predicted with every transport, until the bounds are above the best found.
Partitions and walks back are compared where ranks wait for messages. Of proposals that are equally
fast, that with most room in memory comes first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from ringray import partition, transport
from ringray.base import units
from ringray.base.errors import UserError
from ringray.lab.predict import cost_model, layers, long_ring, rates, transformer
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Direction, Fleet
from ringray.lab.predict.transformer import RankMemory, StepTime, Training
from ringray.lab.trial.config import TrialConfig
from ringray.models.sizes import LayerGroup, Model
from ringray.traffic.walk import BACKWARDS
from ringray.training.recipe import Degrees

LARGEST = 4096  # ranks of a ring, as in specs
USABLE = 0.92  # of a device's memory; the rest is its context, libraries' buffers and gaps
LONGEST = (1 << 31) - 1  # tokens of a sequence
_FEW = 8  # ranks of a ring that holds as much per rank as a larger one
_UNIT = 64  # rows of a rank: lengths that --max-context tries
# Of a step. Of published strategies on the same devices that are predicted to differ by less, a
# third is in the other order; by more, 4% (experiments/published/run.py).
EQUAL = 0.03
_GAIN = 0.005  # of the step; if less is lost, nothing is gained by other transports and walks
_MATTERS = 0.1  # of the step, from which a loss limits it
# What layers keep, and rows of the MLP at once: the fastest first.
_WAYS: list[dict[str, Any]] = [{"kept": some} for some in transformer.KEPT]
_WAYS.insert(0, {"kept": "all", "mlp_rows": None})
_AWAY: dict[str, Any] = {"kept": "input", "offload": True}  # where none of them fits


@dataclass(frozen=True)
class TrainingRequest:
    """A training to find a place for. ``sequences``: of a step. ``fixed``: degrees by name."""

    model: Model
    on: Fleet
    context: int
    sequences: int
    dtype: str = "bfloat16"
    fixed: Mapping[str, int] = field(default_factory=dict)

    @property
    def usable_bytes(self) -> float:
        """Returns the bytes that a rank can use; ranks that share cores share their memory."""
        among = self.on.per_node if self.on.shares_cores else 1
        return (self.on.hardware.memory or math.inf) * USABLE / among

    def room(self, degrees: Degrees, training: Training, memory: RankMemory) -> float:
        """Returns the bytes that a rank leaves free; of its host, if those are fewer."""
        room, node = self.usable_bytes - memory.total, self.on.hardware.host_memory
        if training.offload and node:
            away = transformer.host_bytes(self.model, degrees, training, self.on)
            room = min(room, node * USABLE / self.on.per_node - away)
        return room

    def training(self, way: Mapping[str, Any]) -> Training:
        """Returns the training that keeps activations in one of ``_WAYS``."""
        return Training(self.context, self.sequences, self.dtype, **way)

    def attention(self, degrees: Degrees, **chosen: Any) -> TrialConfig:
        """Returns the attention of one layer and micro-batch on one ring, of the layers with most
        FLOPs."""
        model, tp = self.model, degrees.tp
        ring = {"ring_size": degrees.cp, "seq_len": self.context, "head_dim": model.head_dim}
        heads = {"heads": model.heads // tp, "kv_heads": model.kv_heads // tp, "repeats": 5}
        device = "cpu" if self.on.shares_cores else "cuda"
        usual = {"dtype": self.dtype, "backward": BACKWARDS[0], "device": device}
        config = cost_model.causal_pass(**(ring | heads | usual | chosen))
        return layers.rings(model, config, tp)[0][1]

    def cost(self, degrees: Degrees, config: TrialConfig) -> Cost:
        """Returns the cost of ``config`` on one of the rings, in the mean of the layers."""
        ring = transformer.around(self.on, degrees)
        kinds = layers.rings(self.model, config, degrees.tp)
        return layers.mean_cost((count, _cost(attention, ring)) for count, attention in kinds)

    def expert_ranks(self, degrees: Degrees) -> list[int]:
        """Lists the numbers of ranks of DP x CP among which experts can be dealt."""
        experts = math.gcd(*(group.mlp.experts for group in self.model.groups if group.mlp))
        most = math.gcd(experts, degrees.dp * degrees.cp) if experts else 1
        wanted = self.fixed.get("ep")
        return [n for n in range(1, most + 1) if most % n == 0 and wanted in (None, n)]


@lru_cache(maxsize=4096)
def _cost(config: TrialConfig, ring: Fleet) -> Cost:
    return long_ring.predict(config, ring)


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


def possible(request: TrainingRequest) -> list[Degrees]:
    """Lists the degrees that multiply out; raises UserError, with the rules, if none does."""
    model, on = request.model, request.on
    split = {size for group in model.groups for size in _split(group)}
    divides = {"tp": on.per_node, "pp": model.layers, "dp": request.sequences, "cp": on.ranks}
    rules = (
        f"TP divides the {on.per_node} ranks of a node, heads, K/V heads and MLPs, which are "
        f"{', '.join(map(str, sorted(split)))}; PP {model.layers} layers; "
        f"DP {request.sequences} sequences of a step; EP experts and DP x CP; CP is at most "
        f"{LARGEST}; DP x CP x TP x PP is {on.ranks}"
    )

    def choices(name: str) -> Iterator[int]:
        number = divides[name]
        most = min(number, on.ranks)
        return (
            n for n in range(1, most + 1) if number % n == 0 and request.fixed.get(name, n) == n
        )

    fitting = []
    for tp, pp, dp in itertools.product(*map(choices, ("tp", "pp", "dp"))):
        cp, remaining = divmod(on.ranks, tp * pp * dp)
        fits = cp and not remaining and request.fixed.get("cp", cp) == cp
        if fits and cp <= min(request.context, LARGEST) and not any(size % tp for size in split):
            degrees = Degrees(dp, cp, tp, pp)
            # That with the least memory stands for all.
            fitting += [replace(degrees, ep=n) for n in request.expert_ranks(degrees)[-1:]]
    if not fitting:
        asked = ", ".join(f"--{name} {n}" for name, n in request.fixed.items())
        raise UserError(f"{asked or f'--on {on}'}: cannot be; {rules}")
    return fitting


def _split(group: LayerGroup) -> list[int]:
    """Lists the sizes of a layer that TP divides."""
    of, mlp = group.attention, group.mlp
    sizes = [of.heads, of.kv_heads] if of else []
    if mlp:
        sizes += [mlp.intermediate, mlp.shared_intermediate, mlp.expert_intermediate]
    return [size for size in sizes if size]


def _fitting(request: TrainingRequest, degrees: Degrees, config: TrialConfig) -> list[Proposal]:
    """Lists the ways to keep activations, and to deal experts, that fit into memory."""
    both, exchanged = request.cost(degrees, config), transformer.exchanged(config)
    proposals: list[Proposal] = []
    for way, ep in itertools.product((*_WAYS, _AWAY), request.expert_ranks(degrees)):
        if way is _AWAY and proposals and not proposals[0].training.offload:
            break
        training = replace(request.training(way), exchanged=exchanged)
        dealt = replace(degrees, ep=ep)
        memory = transformer.memory(request.model, dealt, training, both.peak_memory_bytes)
        room = request.room(dealt, training, memory)
        if room >= 0:
            forward = request.cost(degrees, config.changed(direction="forward"))
            time = transformer.step(request.model, dealt, training, request.on, forward, both)
            proposals.append(Proposal(dealt, training, config, both, memory, time, room))
    return proposals


def _proposal(request: TrainingRequest, degrees: Degrees, config: TrialConfig) -> Proposal | None:
    """Returns the fastest way that fits into memory, None if none does."""
    return min(_fitting(request, degrees, config), key=_seconds, default=None)


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
        other = _proposal(request, degrees, config.changed(transport=name))
        best = min(filter(None, (best, other)), key=_seconds, default=None)
        if best and best.time.ring + best.time.again < _GAIN * _seconds(best):
            break
    return best


def _walks(request: TrainingRequest, best: Proposal) -> Proposal:
    """Returns the best of all partitions, and then of all walks back, where ranks wait."""
    if best.time.ring < _GAIN * _seconds(best):
        return best
    for name, values in (("partition", [*partition.PARTITIONS]), ("backward", [*BACKWARDS])):
        for value in values:
            chosen: dict[str, Any] = {name: value}
            with suppress(ValueError):  # this transport has no such walk back
                other = _proposal(request, best.degrees, best.config.changed(**chosen))
                best = min(best, other or best, key=_seconds)
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
    free, training = layers.mean_cost(costs), request.training(_WAYS[0])
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
        rate = rates.find(
            request.on.hardware,
            request.dtype,
            problem.head_dim,
            direction,
            heads=problem.batch * problem.heads,
            kv_heads=problem.batch * problem.kv_heads,
            value_dim=problem.value_dim,
        )
        curves = (rate.full, rate.causal, rate.windowed)
        per_flops += factor / max(some.max() for some in curves if some is not None)
    return problem.visible * (problem.head_dim + problem.value_dim) * problem.heads * per_flops


def advise(request: TrainingRequest, top: int = 3) -> list[Proposal]:
    """Returns the ``top`` fastest proposals of different degrees; those within ``EQUAL`` of the
    fastest come first, by their room in memory.

    Raises:
        UserError: degrees do not multiply out, or nothing fits into memory.
    """
    bounds = {degrees: _bound(request, degrees) for degrees in possible(request)}
    fastest: list[float] = []  # seconds, of each of the degrees so far
    every: list[Proposal] = []
    for degrees in sorted(bounds, key=bounds.__getitem__):
        last = math.inf
        if len(fastest) >= top:
            last = max(fastest[top - 1], (1 + EQUAL) * fastest[0])
        if bounds[degrees] > last:
            break
        if _least(request, degrees, 0)[2] < 0:
            continue
        best = _carried(request, degrees)
        if best and _seconds(best) - best.time.ring < last:
            best = _walks(request, best)
            every += _fitting(request, degrees, best.config)
            fastest = sorted([*fastest, _seconds(best)])
    if not every:
        raise _too_large(request)
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


def needed(
    request: TrainingRequest, degrees: Degrees, attention: float | None = None
) -> RankMemory:
    """Returns the least memory of a rank: layers keep their input, on the device or away, chunks
    walk a ring; ``attention``: bytes of the attention of one layer, if they are known."""
    return _least(request, degrees, attention)[1]


def _least(
    request: TrainingRequest, degrees: Degrees, attention: float | None = None
) -> tuple[Training, RankMemory, float]:
    """Returns the training that leaves most room, its memory and the room."""
    if attention is None:  # depends on the rows of a rank, not on the ranks
        few, rows = min(degrees.cp, _FEW), -(-request.context // degrees.cp)
        config = request.attention(degrees, ring_size=few, seq_len=few * rows)
        attention = request.cost(degrees, config).peak_memory_bytes
    ways = []
    for training in map(request.training, (_WAYS[-1], _AWAY)):
        held = transformer.memory(request.model, degrees, training, attention)
        ways.append((training, held, request.room(degrees, training, held)))
    return max(ways, key=lambda way: way[2])


def memory(request: TrainingRequest, proposal: Proposal, **changed: Any) -> RankMemory:
    """Returns the memory of a proposal whose training has other values of some fields."""
    training, peak = replace(proposal.training, **changed), proposal.both.peak_memory_bytes
    return transformer.memory(request.model, proposal.degrees, training, peak)


def assumptions(request: TrainingRequest, proposal: Proposal) -> list[str]:
    """Returns what a proposal takes for granted, as sentences."""
    lines = layers.assumptions(request.model, proposal.degrees)
    lines += transformer.waiting(request.model, proposal.degrees, proposal.training, request.on)
    on = transformer.around(request.on, proposal.degrees)
    if short := long_ring.shorter(proposal.config, on):
        lines.append(
            f"each further rank of a ring takes as long as the last {short} of {2 * short} do"
        )
    return lines


def alone(request: TrainingRequest) -> float:
    """Returns the bytes that one rank by itself needs for a step of one sequence."""
    return needed(replace(request, sequences=1), Degrees()).total


def smallest_ring(request: TrainingRequest) -> Proposal:
    """Returns the fastest proposal with the smallest CP that fits; CP 1 is no ring."""
    for cp in sorted({degrees.cp for degrees in possible(request)}):
        with suppress(UserError):  # does not fit
            return advise(replace(request, fixed={**request.fixed, "cp": cp}), 1)[0]
    raise _too_large(request)


def _too_large(request: TrainingRequest) -> UserError:
    """Returns the error with the layout that needs least, and what would help."""
    every = ((degrees, *_least(request, degrees)) for degrees in possible(request))
    best, training, held, room = max(every, key=lambda way: way[3])
    parts = dict(vars(held))
    helps = {
        "states": "more ranks, or a smaller model",
        "gathered": "TP",
        "kept": "more ranks for CP, or a shorter context, which --max-context finds",
        "working": "more ranks for CP, TP, or a shorter context, which --max-context finds",
    }[max(parts, key=parts.__getitem__)]
    return UserError(
        f"--context: {request.context:,} tokens of {request.model.name} "
        f"fit into no layout of {request.on}: "
        f"the smallest, {best}, takes {units.memory(held.total)} per rank, "
        f"{units.memory(-room)} more than can be used ("
        + ", ".join(f"{name} {units.memory(value)}" for name, value in parts.items())
        + "".join(
            f"; {line}" for line in transformer.waiting(request.model, best, training, request.on)
        )
        + f"); what helps: {helps}"
    )


class ContextLimit(NamedTuple):
    """The longest context of some degrees, in tokens, and the memory of a rank. ``longest``: no
    sequence can have more."""

    context: int
    degrees: Degrees
    training: Training
    memory: RankMemory
    longest: bool


def max_context(request: TrainingRequest) -> ContextLimit:
    """Returns the longest context of which one sequence per replica fits, by bisection.

    Raises:
        UserError: not even the shortest fits, or the memory of a rank is not known.
    """
    if math.isinf(request.usable_bytes):
        raise UserError(f"--max-context: the entry of {request.on.name} has no `memory`, in bytes")
    sequences = request.fixed.get("dp", 1)
    request = replace(request, sequences=sequences, context=request.on.ranks * _UNIT)
    limits = (_longest(request, degrees) for degrees in possible(request))
    best = max(limits, key=lambda limit: limit.context)
    if not best.context:
        raise _too_large(request)
    return best


def _longest(request: TrainingRequest, degrees: Degrees) -> ContextLimit:
    unit = degrees.cp * _UNIT

    def least(count: int) -> tuple[Training, RankMemory, float]:
        return _least(replace(request, context=count * unit), degrees)

    low, high = 0, LONGEST // unit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if least(middle)[2] >= 0 else (low, middle)
    return ContextLimit(low * unit, degrees, *least(max(low, 1))[:2], (low + 1) * unit > LONGEST)
