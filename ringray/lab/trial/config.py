"""One point of a sweep: the computation of a trial, its strategy and its measurement.

Imports neither torch nor ray.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from ringray import partition as partitions
from ringray import transport as transports
from ringray.partition import BALANCED, Partitioning
from ringray.traffic import deal, geometry
from ringray.traffic.mask import Mask, MaskFields, uneven_boundaries
from ringray.transport import Exchange
from ringray.tuning import lookup
from ringray.tuning import table as tuned
from ringray.tuning.lookup import Strategy
from ringray_kernels.backends import on_device
from ringray_kernels.config import Blocks, Kernel, Problem
from ringray_kernels.dtypes import DTYPES


@dataclass(frozen=True, kw_only=True)
class TrialRing:
    """The ranks of a ring and their place."""

    size: int = field(metadata={"flat": "ring_size"})
    device: str  #: cpu, cuda or auto
    placement: str  #: on nodes, by Ray
    threads: int  #: of a rank, on CPUs
    order: str = "topology"  #: of the ranks along the ring


@dataclass(frozen=True, kw_only=True)
class TrialProblem(MaskFields[int | tuple[int, ...] | None]):
    """The attention to compute: its mask, with ``documents`` as a number of them or their lengths,
    its sizes and its scores. Of a training that of a layer."""

    batch: int  #: sequences, of a training those of a step
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int | None = None  #: None: ``head_dim``
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    dropout_p: float | None = None
    dtype: str
    quantize: str | None = None
    direction: str  #: forward or forward+backward
    new_tokens: int | None = None  #: of a step of decoding, the last of ``seq_len``

    @cached_property
    def mask(self) -> Mask:
        """The mask; ValueError for an invalid one."""
        values = {item.name: getattr(self, item.name) for item in fields(Mask)}
        return Mask(**values | {"documents": _boundaries(self.seq_len, self.documents)})

    @cached_property
    def visible(self) -> int:
        """Visible (query, key) pairs of one pass, per head and batch entry; of the new tokens in
        decoding."""
        every = geometry.total_visible(self.mask)
        if self.new_tokens is None:
            return every
        return every - geometry.total_visible(self.dealt_mask)

    @cached_property
    def dealt_mask(self) -> Mask:
        """The mask of the rows that ranks hold: without the new tokens in decoding."""
        if self.new_tokens is None:
            return self.mask
        return replace(self.mask, seq_len=self.seq_len - self.new_tokens)

    def of_kernel(self, kernel: Kernel) -> Problem:
        """Returns the problem that the blocks of a kernel must fit."""
        group, itemsize = self.heads // self.kv_heads, DTYPES[self.dtype].itemsize
        itemsize = 1 if self.quantize else itemsize
        return Problem(kernel, self.head_dim, itemsize, group, True, self.value_dim, self.rescored)

    @property
    def value_dim(self) -> int:
        """Head dim of V."""
        return self.value_head_dim or self.head_dim

    @property
    def plain(self) -> bool:
        """True for attention as choices are tuned for it: one head dim, plain scores, in dtype."""
        return self.value_dim == self.head_dim and not (self.rescored or self.quantize)

    @property
    def rescored(self) -> bool:
        """True if scores or weights change between the products."""
        return self.softcap is not None or self.alibi or self.dropout_p is not None

    @property
    def has_backward(self) -> bool:
        """True if gradients are computed."""
        return self.direction == "forward+backward"


@dataclass(frozen=True)
class TrialMeasure:
    """The measurement of a point."""

    warmup: int  #: runs before the first measured one
    repeats: int  #: measured runs, the steps of a training
    seed: int  #: of the inputs
    baseline: str | None
    baseline_threads: int | None  #: None for a baseline on the ring
    replica: int  #: number of this trial among those of one point


@dataclass(frozen=True)
class TrialTraining:
    """The training of a decoder; heads and head dim are those of the problem. None in a field: the
    model's, or what its kind does not have."""

    model: str | None = None  #: name of its sizes
    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    pool: bool | None = None  #: the ranks of dp are in the ring, and their sequences are joined
    rope_theta: float | None = None
    micro_batch: int | None = None  #: sequences of a replica at once
    scores: str | None = None
    mlp_rows: int | None = None
    kept: str | None = None  #: tensors that a layer keeps for its backward pass
    offload: bool | None = None  #: inputs of layers leave the device until then
    learning_rate: float | None = None
    corpus: tuple[str, ...] | None = None  #: paths
    tokenizer: str | None = None
    checkpoints: str | None = None  #: their folder
    save_every: int | None = None
    task: str | None = None  #: that it is examined in, instead of a corpus
    examined: tuple[int, ...] | None = None  #: lengths
    budget: int | None = None  #: bytes of a CPU rank's tensors, beyond which it has failed

    @property
    def joined(self) -> int:
        """Sequences that a pool joins into one; 1 without."""
        return (self.dp or 1) if self.pool else 1


@dataclass(frozen=True)
class TrialConfig:
    """One point, in the sections of a spec; stored flat. Lengths are tokens."""

    problem: TrialProblem
    training: TrialTraining | None  #: None in kinds that train nothing
    ring: TrialRing
    strategy: Strategy  #: blocks as in a spec, and no source
    measure: TrialMeasure

    def flat(self) -> dict[str, Any]:
        """Returns the fields of all sections by their flat names."""
        return {
            name: getattr(getattr(self, section), own_name, None)
            for name, (section, own_name) in _PLACES.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON: tuples are lists, and fields that earlier versions did not
        have are left out where they have their default, so that digests stay."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in self.flat().items()
            if name in _FIRST or value != LATER[name]
        }

    @classmethod
    def from_dict(cls, flat: Mapping[str, Any]) -> TrialConfig:
        """Returns the inverse of ``as_dict``, and of ``flat``; TypeError for other fields."""
        parts = _parts(flat)
        made: dict[str, Any] = {
            name: section(**parts.get(name, {})) for name, section in _SECTIONS.items()
        }
        trains = made["training"] != TrialTraining()
        return cls(**made if trains else {**made, "training": None})

    def changed(self, **flat: Any) -> TrialConfig:
        """Returns a config with other values of the fields with these flat names."""
        parts = _parts(flat)
        changes = {name: replace(getattr(self, name), **part) for name, part in parts.items()}
        return replace(self, **changes)

    @cached_property
    def cut(self) -> Blocks | int | None:
        """``blocks`` as the op takes them; the field holds the text of a spec."""
        blocks = self.strategy.blocks
        return Blocks.parse(blocks) if isinstance(blocks, str) else blocks

    @cached_property
    def partition(self) -> Partitioning:
        """The partition of its ring: ``balanced`` is dealt for the mask."""
        name = self.strategy.partition
        return deal.deal(self.problem.dealt_mask, self.ring.size) if name == BALANCED else name

    @cached_property
    def padded(self) -> int:
        """Length that the ranks share, padding included, in tokens."""
        seq_len, ranks = self.problem.seq_len, self.ring.size
        return partitions.padded_length(self.strategy.partition, seq_len, ranks)

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange of the transport; ValueError if it does not fit ring and heads."""
        heads, kv_heads = self.problem.heads, self.problem.kv_heads
        return transports.plan(self.strategy.transport, self.ring.size, heads, kv_heads)

    @property
    def inner(self) -> int:
        """Ranks that follow each other and belong on one node: those of TP, and of an inner group
        of the transport."""
        tp, others = 1, 1
        if train := self.training:
            tp, others = train.tp or 1, (train.dp or 1) // train.joined * (train.pp or 1)
        ring = self.ring.size // (tp * others)
        with suppress(ValueError):  # it is left open
            heads, kv_heads = self.problem.heads // tp, self.problem.kv_heads // tp
            return tp * transports.plan(self.strategy.transport, ring, heads, kv_heads).inner
        return tp

    def buckets(self, device: str) -> tuned.Buckets:
        """Returns the buckets of tuned choices of this point on ``device`` (cpu, cuda)."""
        problem = self.problem
        return tuned.buckets(
            problem.mask,
            ring_size=self.ring.size,
            threads=self.ring.threads if device == "cpu" else 0,
            dtype=problem.dtype,
            batch=problem.batch,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            head_dim=problem.head_dim,
            backward=problem.has_backward,
        )


_SECTIONS: dict[str, type] = {
    "problem": TrialProblem,
    "training": TrialTraining,
    "ring": TrialRing,
    "strategy": Strategy,
    "measure": TrialMeasure,
}
# The order of flat fields, as they are stored. Those of ``_FIRST`` always are; the others came
# later, the last of them in the order of their sections.
_FIRST = (
    "ring_size", "threads", "dtype", "seq_len", "batch", "heads", "kv_heads", "head_dim", "causal",
    "window", "documents", "direction", "transport", "backward", "backend", "blocks", "partition",
    "device", "placement", "warmup", "repeats", "seed", "baseline", "baseline_threads", "replica",
)  # fmt: skip
_NEXT = ("chunk", "prefix", "new_tokens", "value_head_dim", "softcap", "sinks", "global_tokens")
_FIELDS = {
    str(item.metadata.get("flat", item.name)): (section, item)
    for section, made_of in _SECTIONS.items()
    for item in fields(made_of)
    if item.name != "source"
}
FIELDS = tuple(dict.fromkeys((*_FIRST, *_NEXT, *_FIELDS)))
_PLACES = {name: (_FIELDS[name][0], _FIELDS[name][1].name) for name in FIELDS}
# Fields that earlier versions did not have, and their defaults.
LATER = {name: _FIELDS[name][1].default for name in FIELDS if name not in _FIRST}


def _parts(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sorts flat fields into their sections; lists become tuples."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        section, own_name = _PLACES.get(name, ("problem", name))  # which refuses unknown ones
        parts.setdefault(section, {})[own_name] = tuple(value) if isinstance(value, list) else value
    return parts


def shuffled(size: int, seed: int) -> tuple[int, ...]:
    """Returns the places of a ring's ranks, counted in the order of the topology."""
    return tuple(random.Random(seed).sample(range(size), size))


@lru_cache(maxsize=4096)
def _boundaries(seq_len: int, documents: int | tuple[int, ...] | None) -> tuple[int, ...] | None:
    if isinstance(documents, int):
        return uneven_boundaries(seq_len, documents)
    return None if documents is None else (0, *itertools.accumulate(documents))


def resolved(config: TrialConfig, place: tuned.Place) -> tuple[TrialConfig, str]:
    """Returns a config with every choice made, and their source ("" if none was open)."""
    asked = config.strategy
    if "auto" not in (asked.partition, asked.transport) and asked.blocks is not None:
        return config, ""
    wanted = config.buckets(place.device)
    backend = on_device(asked.backend, place.device)
    names = {**vars(asked), "backend": backend}
    del names["source"]
    chosen = lookup.strategy(wanted, place, **names, backend_open=asked.backend == "auto")
    if not config.problem.plain or chosen.backend == backend:
        chosen = replace(chosen, backend=asked.backend)
    if not config.problem.plain:
        chosen = replace(chosen, blocks=asked.blocks)
    return replace(config, strategy=replace(chosen, source="")), chosen.source


def default_config(config: TrialConfig) -> TrialConfig:
    """Returns a config with the defaults in place of ``auto``, for predictions without hardware."""
    names = [name for name in ("partition", "transport") if vars(config.strategy)[name] == "auto"]
    return config.changed(**{name: tuned.DEFAULTS[name] for name in names})
