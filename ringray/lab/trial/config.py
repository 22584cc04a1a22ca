"""One point of a sweep: the computation of a trial, its strategy and its measurement.

Imports neither torch nor ray.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from ringray import partition as partitions
from ringray.traffic import geometry
from ringray.tuning import lookup
from ringray.tuning import table as tuned
from ringray_kernels.backends import on_device
from ringray_kernels.config import Blocks


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
    window: int | None
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

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON; ``documents`` is a count, a list of lengths or None."""
        flat = {name: getattr(self, name) for name in FIELDS}
        if isinstance(self.documents, tuple):
            flat["documents"] = list(self.documents)
        return flat

    @classmethod
    def from_dict(cls, flat: dict[str, Any]) -> TrialConfig:
        """Returns the inverse of ``as_dict``."""
        documents = flat["documents"]
        return cls(
            **{**flat, "documents": tuple(documents) if isinstance(documents, list) else documents}
        )

    @cached_property
    def mask(self) -> geometry.Mask:
        """The mask of the problem; ValueError for an invalid one."""
        return _mask(self.seq_len, self.causal, self.window, self.documents)

    @cached_property
    def cut(self) -> Blocks | int | None:
        """``blocks`` as the op takes them; the field holds the text of a spec."""
        return Blocks.parse(self.blocks) if isinstance(self.blocks, str) else self.blocks

    @cached_property
    def padded(self) -> int:
        """Length that the ranks share, padding included, in tokens."""
        return partitions.padded_length(self.partition, self.seq_len, self.ring_size)

    def buckets(self, device: str) -> tuned.Buckets:
        """Returns the buckets of tuned choices of this point on ``device`` (cpu, cuda)."""
        return tuned.buckets(
            ring_size=self.ring_size,
            threads=self.threads if device == "cpu" else 0,
            dtype=self.dtype,
            seq_len=self.seq_len,
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            causal=self.causal,
            window=self.window,
            documents=self.documents,
            backward=self.has_backward,
        )

    @property
    def has_backward(self) -> bool:
        """True if gradients are computed."""
        return self.direction == "forward+backward"


FIELDS = tuple(field.name for field in fields(TrialConfig))
# Fields that a table of tuned choices settles.
CHOICES = ("partition", "transport", "backward", "blocks")


@lru_cache(maxsize=4096)
def _mask(
    seq_len: int, causal: bool, window: int | None, documents: int | tuple[int, ...] | None
) -> geometry.Mask:
    bounds: tuple[int, ...] | None = None
    if isinstance(documents, int):
        bounds = geometry.document_boundaries(seq_len, documents)
    elif documents is not None:
        bounds = (0, *itertools.accumulate(documents))
    return geometry.Mask(seq_len, causal, window, bounds)


def resolved(config: TrialConfig, place: tuned.Place) -> tuple[TrialConfig, str]:
    """Returns a config with every choice made, and their source ("" if none was open)."""
    if "auto" not in (config.partition, config.transport) and config.blocks is not None:
        return config, ""
    wanted = config.buckets(place.device)
    backend = on_device(config.backend, place.device)
    asked = {name: getattr(config, name) for name in CHOICES}
    found = lookup.strategy(wanted, place, backend=backend, **asked)
    return replace(config, **{name: getattr(found, name) for name in CHOICES}), found.source


def default_config(config: TrialConfig) -> TrialConfig:
    """Returns a config with the defaults in place of ``auto``, for predictions without hardware."""
    names = [name for name in ("partition", "transport") if getattr(config, name) == "auto"]
    chosen: dict[str, Any] = {name: tuned.DEFAULTS[name] for name in names}
    return replace(config, **chosen) if chosen else config
