"""One point of a sweep: the computation of a trial, its strategy and its measurement.

Imports neither torch nor ray.
"""

from __future__ import annotations

import itertools
import random
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from ringray import partition as partitions
from ringray import transport as transports
from ringray.traffic import geometry
from ringray.traffic.mask import Mask, document_boundaries
from ringray.tuning import lookup
from ringray.tuning import table as tuned
from ringray_kernels.backends import on_device
from ringray_kernels.config import Blocks, Kernel, Problem
from ringray_kernels.dtypes import DTYPES


@dataclass(frozen=True)
class TrialConfig:
    """One point as flat fields. Lengths are tokens."""

    ring_size: int
    threads: int
    dtype: str
    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | tuple[int | None, int | None] | None
    documents: int | tuple[int, ...] | None
    direction: str
    transport: str
    backward: str
    backend: str
    blocks: int | str | None
    partition: str
    device: str
    placement: str
    warmup: int
    repeats: int
    seed: int
    baseline: str | None
    baseline_threads: int | None
    replica: int
    chunk: int | None = None
    prefix: int | None = None
    new_tokens: int | None = None
    value_head_dim: int | None = None
    softcap: float | None = None
    sinks: bool = False
    global_tokens: int | None = None
    alibi: bool = False
    dropout_p: float | None = None
    quantize: str | None = None
    model: str | None = None  # of a training, and its sizes beside heads and head dims
    layers: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    vocab: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    rope_theta: float | None = None
    micro_batch: int | None = None
    scores: str | None = None
    mlp_rows: int | None = None
    kept: str | None = None
    learning_rate: float | None = None
    corpus: tuple[str, ...] | None = None
    tokenizer: str | None = None
    checkpoints: str | None = None
    save_every: int | None = None
    task: str | None = None  # that a training is examined in, instead of a corpus
    examined: tuple[int, ...] | None = None  # lengths
    budget: int | None = None  # bytes of a CPU rank's tensors, beyond which a training has failed
    order: str = "topology"  # of the ranks

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON: tuples are lists, and fields that earlier versions did not
        have are left out where they have their default, so that digests stay."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, default in _DEFAULTS
            if (value := getattr(self, name)) != default
        }

    @classmethod
    def from_dict(cls, flat: dict[str, Any]) -> TrialConfig:
        """Returns the inverse of ``as_dict``."""
        tuples = {name: tuple(value) for name, value in flat.items() if isinstance(value, list)}
        return cls(**{**flat, **tuples})

    @cached_property
    def mask(self) -> Mask:
        """The mask of the problem; ValueError for an invalid one."""
        values = {item.name: getattr(self, item.name) for item in fields(Mask)}
        return Mask(**values | {"documents": _boundaries(self.seq_len, self.documents)})

    @cached_property
    def visible(self) -> int:
        """Visible (query, key) pairs of one pass, per head and batch entry; of the new tokens in
        decoding."""
        every = geometry.total_visible(self.mask)
        if self.new_tokens is None:
            return every
        before = replace(self.mask, seq_len=self.seq_len - self.new_tokens)
        return every - geometry.total_visible(before)

    @cached_property
    def cut(self) -> Blocks | int | None:
        """``blocks`` as the op takes them; the field holds the text of a spec."""
        return Blocks.parse(self.blocks) if isinstance(self.blocks, str) else self.blocks

    @cached_property
    def padded(self) -> int:
        """Length that the ranks share, padding included, in tokens."""
        return partitions.padded_length(self.partition, self.seq_len, self.ring_size)

    @property
    def inner(self) -> int:
        """Ranks that follow each other and belong on one node: those of TP, and of an inner group
        of the transport."""
        tp = self.tp or 1
        ring = self.ring_size // (tp * (self.dp or 1) * (self.pp or 1))
        with suppress(ValueError):  # it is left open
            heads, kv_heads = self.heads // tp, self.kv_heads // tp
            return tp * transports.plan(self.transport, ring, heads, kv_heads).inner
        return tp

    def kernel_problem(self, kernel: Kernel) -> Problem:
        """Returns the problem that the blocks of a kernel must fit."""
        group, itemsize = self.heads // self.kv_heads, DTYPES[self.dtype].itemsize
        itemsize = 1 if self.quantize else itemsize
        return Problem(kernel, self.head_dim, itemsize, group, True, self.value_dim, self.rescored)

    def buckets(self, device: str) -> tuned.Buckets:
        """Returns the buckets of tuned choices of this point on ``device`` (cpu, cuda)."""
        return tuned.buckets(
            self.mask,
            ring_size=self.ring_size,
            threads=self.threads if device == "cpu" else 0,
            dtype=self.dtype,
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            backward=self.has_backward,
        )

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


FIELDS = tuple(field.name for field in fields(TrialConfig))
# Fields that earlier versions did not have, and their defaults.
LATER = {field.name: field.default for field in fields(TrialConfig) if field.default is not MISSING}
_DEFAULTS = tuple((field.name, field.default) for field in fields(TrialConfig))
# Fields that a table of tuned choices settles.
CHOICES = ("partition", "transport", "backward", "backend", "blocks")


def shuffled(size: int, seed: int) -> tuple[int, ...]:
    """Returns the seats of a ring's ranks, counted in the order of the topology."""
    return tuple(random.Random(seed).sample(range(size), size))


@lru_cache(maxsize=4096)
def _boundaries(seq_len: int, documents: int | tuple[int, ...] | None) -> tuple[int, ...] | None:
    if isinstance(documents, int):
        return document_boundaries(seq_len, documents)
    return None if documents is None else (0, *itertools.accumulate(documents))


def resolved(config: TrialConfig, place: tuned.Place) -> tuple[TrialConfig, str]:
    """Returns a config with every choice made, and their source ("" if none was open)."""
    if "auto" not in (config.partition, config.transport) and config.blocks is not None:
        return config, ""
    wanted = config.buckets(place.device)
    backend = on_device(config.backend, place.device)
    asked = {name: getattr(config, name) for name in CHOICES}
    found = lookup.strategy(
        wanted, place, **asked | {"backend": backend}, backend_open=config.backend == "auto"
    )
    chosen = {name: getattr(found, name) for name in CHOICES}
    if not config.plain or found.backend == backend:
        chosen["backend"] = config.backend
    if not config.plain:
        chosen["blocks"] = config.blocks
    return replace(config, **chosen), found.source


def default_config(config: TrialConfig) -> TrialConfig:
    """Returns a config with the defaults in place of ``auto``, for predictions without hardware."""
    names = [name for name in ("partition", "transport") if getattr(config, name) == "auto"]
    chosen: dict[str, Any] = {name: tuned.DEFAULTS[name] for name in names}
    return replace(config, **chosen) if chosen else config
