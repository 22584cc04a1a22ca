"""Advice: the degrees DP x CP x TP x PP, and the ring, that train a model fastest on a fleet.

All degrees that multiply out are listed with a lower bound of their step; in that order the
attention of each is predicted with every transport, until the bounds are above the best found.
Partitions and walks back are compared where ranks wait for messages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import mean
from typing import Any, NamedTuple

from ringray import partition, transport
from ringray.base import units
from ringray.base.errors import UserError
from ringray.lab.predict import cost_model, long_ring, rates, transformer
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Direction, Fleet
from ringray.lab.predict.transformer import RankMemory, StepTime, Training
from ringray.lab.trial import lengths
from ringray.lab.trial.config import TrialConfig
from ringray.models.sizes import Model
from ringray.traffic.walk import BACKWARDS
from ringray.training.recipe import Degrees

LARGEST = 4096  # ranks of a ring, as in specs
USABLE = 0.92  # of a device's memory; the rest is its context, libraries' buffers and gaps
LONGEST = (1 << 31) - 1  # tokens of a sequence
_FEW = 8  # ranks of a ring that holds as much per rank as a larger one
_UNIT = 64  # rows of a rank: lengths that --max-context tries
_GAIN = 0.005  # of the step; if less is lost, nothing is gained by other transports and walks
_MATTERS = 0.1  # of the step, from which a loss limits it
_BATCHES = 4  # drawn from a table of lengths
_LARGEST_POOL = 512  # ranks: the tables of a larger one take long
_SPLIT = ("heads", "kv_heads", "intermediate")  # of a model, by TP
# What layers keep, and rows of the MLP at once: the fastest first.
_WAYS: list[dict[str, Any]] = [{"kept": some} for some in transformer.KEPT]
_WAYS.insert(0, {"kept": "all", "mlp_rows": None})


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

    def training(self, way: Mapping[str, Any]) -> Training:
        """Returns the training that keeps activations in one of ``_WAYS``."""
        return Training(self.context, self.sequences, self.dtype, **way)

    def attention(self, degrees: Degrees, **chosen: Any) -> TrialConfig:
        """Returns the attention of one layer and micro-batch on one ring."""
        model, tp = self.model, degrees.tp
        ring = {"ring_size": degrees.cp, "seq_len": self.context, "head_dim": model.head_dim}
        heads = {"heads": model.heads // tp, "kv_heads": model.kv_heads // tp, "repeats": 5}
        device = "cpu" if self.on.shares_cores else "cuda"
        usual = {"dtype": self.dtype, "backward": BACKWARDS[0], "device": device}
        return cost_model.causal_pass(**(ring | heads | usual | chosen))

    def cost(self, degrees: Degrees, config: TrialConfig) -> Cost:
        """Returns the cost of ``config`` on one of the rings."""
        return _cost(config, transformer.around(self.on, degrees))


@lru_cache(maxsize=4096)
def _cost(config: TrialConfig, ring: Fleet) -> Cost:
    return long_ring.predict(config, ring)


class Proposal(NamedTuple):
    """One way to train. ``config``: the attention of one ring; ``both``: its cost."""

    degrees: Degrees
    training: Training
    config: TrialConfig
    both: Cost
    memory: RankMemory
    time: StepTime

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
            "memory: activations are computed again": self.time.again,
            f"messages of the ring {far if self.both.outer_bytes else near}": self.time.ring,
            f"messages of TP {near}": self.time.tensor,
            f"shards of weights {far if on.nodes > 1 else near}": self.time.shards,
            "stages that wait for others": self.time.pipeline,
        }
        largest = max(losses, key=losses.__getitem__)
        return largest if losses[largest] > _MATTERS * self.time.total else "compute"


def possible(request: TrainingRequest) -> list[Degrees]:
    """Lists the degrees that multiply out; raises UserError, with the rules, if none does."""
    model, on = request.model, request.on
    divides = {"tp": on.per_node, "pp": model.layers, "dp": request.sequences, "cp": on.ranks}
    rules = (
        f"TP divides the {on.per_node} ranks of a node, {model.heads} heads, {model.kv_heads} K/V "
        f"heads and an MLP of {model.intermediate}; PP {model.layers} layers; "
        f"DP {request.sequences} sequences of a step; CP is at most {LARGEST}; "
        f"DP x CP x TP x PP is {on.ranks}"
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
        if (
            fits
            and cp <= min(request.context, LARGEST)
            and not any(getattr(model, of) % tp for of in _SPLIT)
        ):
            fitting.append(Degrees(dp, cp, tp, pp))
    if not fitting:
        asked = ", ".join(f"--{name} {n}" for name, n in request.fixed.items())
        raise UserError(f"{asked or f'--on {on}'}: cannot be; {rules}")
    return fitting


def _proposal(request: TrainingRequest, degrees: Degrees, config: TrialConfig) -> Proposal | None:
    """Returns the first way to keep activations that fits into memory, None if none does."""
    both, exchanged = request.cost(degrees, config), transformer.exchanged(config)
    for way in _WAYS:
        training = replace(request.training(way), exchanged=exchanged)
        memory = transformer.memory(request.model, degrees, training, both.peak_memory_bytes)
        if memory.total <= request.usable_bytes:
            forward = request.cost(degrees, config.changed(direction="forward"))
            time = transformer.step(request.model, degrees, training, request.on, forward, both)
            return Proposal(degrees, training, config, both, memory, time)
    return None


def _exchanges(request: TrainingRequest, degrees: Degrees) -> list[str]:
    """Lists the transports that fit, those with short walks first, as these are predicted fast.
    Their number, if they need one, is the size of a node's part of the ring."""
    part = min(degrees.cp, max(1, request.on.per_node // degrees.tp))
    heads = degrees.cp, request.model.heads // degrees.tp, request.model.kv_heads // degrees.tp
    folds = {}
    for name, entry in transport.TRANSPORTS.items():
        text = {"name": name, "divisors": f"{name}:{part}"}.get(entry.searched)
        with suppress(ValueError):  # does not fit
            if text and (text == name or 1 < part < degrees.cp):
                folds[text] = transport.plan(text, *heads).fold
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
    problem, per_flops = request.attention(degrees).problem, []
    ways: tuple[tuple[Direction, int], ...] = (("forward", 4), ("backward", 10))
    for direction, factor in ways:
        rate = rates.find(
            request.on.hardware,
            request.dtype,
            problem.head_dim,
            direction,
            heads=problem.batch * problem.heads,
            kv_heads=problem.batch * problem.kv_heads,
        )
        per_flops.append(factor / max(rate.full.max(), rate.causal.max()))
    ms = problem.visible * problem.head_dim * problem.heads / degrees.cp * sum(per_flops) * 1e3
    free = Cost(0, 0, 0, 0, ms, 1.0, ms, ms, 0.0, 0, 0)
    return transformer.step(
        request.model, degrees, request.training(_WAYS[0]), request.on, free, free
    ).total


def advise(request: TrainingRequest, top: int = 3) -> list[Proposal]:
    """Returns the ``top`` fastest proposals of different degrees.

    Raises:
        UserError: degrees do not multiply out, or nothing fits into memory.
    """
    bounds = {degrees: _bound(request, degrees) for degrees in possible(request)}
    best_first: list[Proposal] = []
    for degrees in sorted(bounds, key=bounds.__getitem__):
        last = _seconds(best_first[top - 1]) if len(best_first) >= top else math.inf
        if bounds[degrees] > last:
            break
        if needed(request, degrees, 0).total > request.usable_bytes:
            continue
        best = _carried(request, degrees)
        if best and _seconds(best) - best.time.ring < last:
            best_first = sorted([*best_first, _walks(request, best)], key=_seconds)
    if not best_first:
        raise _too_large(request)
    return best_first[:top]


def needed(
    request: TrainingRequest, degrees: Degrees, attention: float | None = None
) -> RankMemory:
    """Returns the least memory of a rank: layers keep their input, chunks walk a ring;
    ``attention``: bytes of the attention of one layer, if they are known."""
    if attention is None:  # depends on the rows of a rank, not on the ranks
        few, rows = min(degrees.cp, _FEW), -(-request.context // degrees.cp)
        config = request.attention(degrees, ring_size=few, seq_len=few * rows)
        attention = request.cost(degrees, config).peak_memory_bytes
    return transformer.memory(request.model, degrees, request.training(_WAYS[-1]), attention)


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
    every = ((degrees, needed(request, degrees)) for degrees in possible(request))
    best, held = min(every, key=lambda pair: pair[1].total)
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
        f"{units.memory(held.total - request.usable_bytes)} more than can be used ("
        + ", ".join(f"{name} {units.memory(value)}" for name, value in parts.items())
        + f"); what helps: {helps}"
    )


class Pooled(NamedTuple):
    """Time (ms) of the attention of a layer, both passes, in the mean of batches in which each
    replica packs a sequence. ``rings``: of the slowest replica's ring; ``pool``: of one ring of all
    replicas, whose documents are dealt and sent with ``transport``."""

    ranks: int
    rings: float
    pool: float
    transport: str


def pooled(request: TrainingRequest, best: Proposal, table: lengths.Table) -> Pooled:
    """Compares the rings of a proposal with one pool of their ranks, on documents drawn from a
    table.

    Raises:
        UserError: the documents or the ranks are too many.
    """
    dp, config = best.degrees.dp, best.config.changed(backward=BACKWARDS[0])
    together = replace(best.degrees, dp=1, cp=dp * best.degrees.cp)
    if together.cp > _LARGEST_POOL:
        raise UserError(f"--lengths: got {together.cp} ranks of DP x CP, at most {_LARGEST_POOL}")
    batches = [
        [lengths.drawn(table, request.context, dp * batch + replica) for replica in range(dp)]
        for batch in range(_BATCHES)
    ]

    def ms(degrees: Degrees, config: TrialConfig, documents: tuple[int, ...]) -> float:
        return request.cost(degrees, config.changed(documents=documents)).time_ms

    rings = mean(max(ms(best.degrees, config, docs) for docs in batch) for batch in batches)
    whole = config.changed(
        ring_size=together.cp, seq_len=dp * request.context, partition=partition.BALANCED
    )
    pools = {}
    for name in (transport.DEALT, config.strategy.transport):
        with suppress(ValueError):  # it does not fit the larger ring
            pool_config = whole.changed(transport=name)
            pools[name] = mean(ms(together, pool_config, sum(batch, ())) for batch in batches)
    fastest = min(pools, key=pools.__getitem__)
    return Pooled(together.cp, rings, pools[fastest], fastest)


class ContextLimit(NamedTuple):
    """The longest context of some degrees, in tokens, and the memory of a rank. ``longest``: no
    sequence can have more."""

    context: int
    degrees: Degrees
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

    def held(count: int) -> RankMemory:
        return needed(replace(request, context=count * unit), degrees)

    low, high = 0, LONGEST // unit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if held(middle).total <= request.usable_bytes else (low, middle)
    return ContextLimit(low * unit, degrees, held(max(low, 1)), (low + 1) * unit > LONGEST)
