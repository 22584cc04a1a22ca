"""Layouts of a training on a fleet: degrees that multiply out, what a rank of them needs at least,
and the longest context that they hold.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ringray.base import units
from ringray.base.errors import UserError
from ringray.lab.predict import cost_model, layers, long_ring, rank_memory, transformer
from ringray.lab.predict.cost_model import Cost
from ringray.lab.predict.hardware import Fleet
from ringray.lab.predict.rank_memory import RankMemory, Training
from ringray.lab.trial.config import TrialConfig
from ringray.models.sizes import LayerGroup, Model
from ringray.traffic.walk import BACKWARDS
from ringray.training.recipe import Degrees

LARGEST = 4096  # ranks of a ring, as in specs
USABLE = 0.92  # of a device's memory; the rest is its context, libraries' buffers and gaps
LONGEST = (1 << 31) - 1  # tokens of a sequence
_FEW = 8  # ranks of a ring that holds as much per rank as a larger one
UNIT = 64  # rows of a rank: lengths that --max-context tries
# What layers keep, and rows of the MLP at once: the fastest first.
WAYS: list[dict[str, Any]] = [{"kept": some} for some in rank_memory.KEPT]
WAYS.insert(0, {"kept": "all", "mlp_rows": None})
AWAY: dict[str, Any] = {"kept": "input", "offload": True}  # where none of them fits


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
            away = rank_memory.host_bytes(self.model, degrees, training, self.on)
            room = min(room, node * USABLE / self.on.per_node - away)
        return room

    def training(self, way: Mapping[str, Any]) -> Training:
        """Returns the training that keeps activations in one of ``WAYS``."""
        return Training(self.context, self.sequences, self.dtype, **way)

    def assumptions(self, degrees: Degrees, training: Training) -> list[str]:
        """Returns what is taken for granted about such a training, as sentences."""
        lines = layers.assumptions(self.model, degrees)
        if 0 < self.model.positions < training.context:
            lines.append(f"the config's positions end at {self.model.positions:,}")
        return lines + rank_memory.waiting(self.model, degrees, training, self.on)

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
        return layers.mean_cost((count, long_ring.predict(some, ring)) for count, some in kinds)

    @property
    def experts(self) -> int:
        """Returns the greatest common divisor of the layers' experts, 0 where none has any."""
        return math.gcd(*(group.mlp.experts for group in self.model.groups if group.mlp))

    def expert_ranks(self, degrees: Degrees) -> list[int]:
        """Lists the numbers of ranks of DP x CP among which experts can be dealt."""
        most = math.gcd(self.experts, degrees.dp * degrees.cp) if self.experts else 1
        wanted = self.fixed.get("ep")
        return [n for n in range(1, most + 1) if most % n == 0 and wanted in (None, n)]


def possible(request: TrainingRequest) -> list[Degrees]:
    """Lists the degrees that multiply out; raises UserError, with the rules, if none does."""
    model, on = request.model, request.on
    if (ep := request.fixed.get("ep", 1)) > 1 and not request.experts:
        raise UserError(f"--ep {ep}: cannot be, as {model.name} has no experts")
    split = {size for group in model.groups for size in _split(group)}
    divides = {"tp": on.per_node, "pp": model.layers, "dp": request.sequences, "cp": on.ranks}
    rules = (
        f"TP divides the {on.per_node} ranks of a node, heads, K/V heads and MLPs, which are "
        f"{', '.join(map(str, sorted(split)))}; PP {model.layers} layers; "
        f"DP {request.sequences} sequences of a step; EP experts and DP x CP; CP is at most "
        f"{LARGEST}; DP x CP x TP x PP is {on.ranks}"
    )

    def choices(name: str) -> Iterator[int]:
        number, wanted = divides[name], request.fixed.get(name)
        most = min(number, on.ranks)
        return (n for n in range(1, most + 1) if number % n == 0 and wanted in (None, n))

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


class Least(NamedTuple):
    """The least that a rank of some degrees holds: the training that leaves most room, its memory,
    and the ``room`` in bytes, which is below 0 where nothing fits."""

    degrees: Degrees
    training: Training
    memory: RankMemory
    room: float


def least(request: TrainingRequest, degrees: Degrees, attention: float | None = None) -> Least:
    """Returns the least that a rank holds: layers keep their input, on the device or away, chunks
    walk a ring; ``attention``: bytes of the attention of one layer, if they are known."""
    if attention is None:  # depends on the rows of a rank, not on the ranks
        few, rows = min(degrees.cp, _FEW), -(-request.context // degrees.cp)
        config = request.attention(degrees, ring_size=few, seq_len=few * rows)
        attention = request.cost(degrees, config).peak_memory_bytes
    ways = []
    for training in map(request.training, (WAYS[-1], AWAY)):
        held = rank_memory.memory(request.model, degrees, training, attention)
        ways.append(Least(degrees, training, held, request.room(degrees, training, held)))
    return max(ways, key=lambda way: way.room)


def too_large(request: TrainingRequest, option: str = "--context") -> UserError:
    """Returns the error with the layout that needs least, and what would help."""
    every = (least(request, degrees) for degrees in possible(request))
    best, training, held, room = max(every, key=lambda way: way.room)
    helps = {
        "states": "more ranks, or a smaller model",
        "gathered": "TP",
        "kept": "more ranks for CP, or a shorter context, which --max-context finds",
        "working": "more ranks for CP, TP, or a shorter context, which --max-context finds",
    }[held.largest]
    return UserError(
        f"{option}: {request.context:,} tokens of {request.model.name} "
        f"fit into no layout of {request.on}: "
        f"the smallest, {best}, takes {units.memory(held.total)} per rank, "
        f"{units.memory(-room)} more than can be used ({held}"
        + "".join(
            f"; {line}" for line in rank_memory.waiting(request.model, best, training, request.on)
        )
        + f"); what helps: {helps}"
    )


def max_context(request: TrainingRequest) -> Least:
    """Returns what a rank holds with the longest context of which one sequence per replica fits, by
    bisection in steps of ``UNIT`` rows of a rank.

    Raises:
        UserError: not even the shortest fits, or the memory of a rank is not known.
    """
    if math.isinf(request.usable_bytes):
        raise UserError(f"--max-context: the entry of {request.on.name} has no `memory`, in bytes")
    sequences = request.fixed.get("dp", 1)
    request = replace(request, sequences=sequences, context=request.on.ranks * UNIT)
    best: Least | None = None
    for degrees in possible(request):
        best = _longer(request, degrees, best.training.context if best else 0) or best
    if best is None:
        raise too_large(request, "--max-context")
    return best


def _longer(request: TrainingRequest, degrees: Degrees, than: int) -> Least | None:
    """Returns what a rank holds with the longest context of some degrees; None if that is no
    longer than ``than`` tokens."""
    unit = degrees.cp * UNIT

    def holding(count: int) -> Least:
        return least(replace(request, context=count * unit), degrees)

    # Memory grows with the context: a layout that does not hold a little more than the best so far
    # holds no longer one, and of the rest all that is too long follows all that fits.
    first = than // unit + 1
    if first * unit > LONGEST or holding(first).room < 0:
        return None
    further = range(first + 1, LONGEST // unit + 1)
    return holding(first + bisect.bisect(further, False, key=lambda count: holding(count).room < 0))
