"""One rank's share of one attention problem: positions, intervals and walks, cached per geometry.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringray import partition as partitions
from ringray.walk import Hop, Pass, Rows, Walk, plan
from ringray_kernels.intervals import intervals, visible_range

if TYPE_CHECKING:
    from ringray.geometry import Mask
    from ringray_kernels.config import Blocks

FP32_BYTES = 4


@dataclass(frozen=True)
class Job:
    """What one rank must know to compute its shard; equal on all ranks but for ``rank``.

    ``padded``: global length dealt (tokens). ``kv_row_bytes``: bytes of one position of K and V
    together; gradients travel in fp32, so their rows cost ``4 / itemsize`` as much.
    """

    partition: str
    padded: int
    world_size: int
    rank: int
    mask: Mask
    scale: float
    backend: str
    blocks: Blocks | int | None
    itemsize: int

    @property
    def shard_rows(self) -> int:
        """Rows of each rank's shard."""
        return self.padded // self.world_size

    def hops(self, which: Pass) -> tuple[Hop, ...]:
        """This rank's hops, own chunk first."""
        return self.walk(which).hops[self.rank]

    def walk(self, which: Pass) -> Walk:
        """The ring's walk for one pass."""
        return plan(
            self.partition,
            self.padded,
            self.world_size,
            self.mask,
            which,
            self.itemsize,
            FP32_BYTES,
        )

    def intervals(self, owner: int, rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
        """int32 (1, S) ``start``, ``end``: which of ``rows`` of ``owner``'s chunk a query sees."""
        low, high = _seen_by(
            self.mask, self.partition, self.padded, self.world_size, self.rank, device
        )
        keys = positions(self.partition, self.padded, self.world_size, owner, device)
        start, end = intervals(low, high, keys[rows.start : rows.stop])
        return start.unsqueeze(0), end.unsqueeze(0)


@lru_cache(maxsize=64)
def positions(
    partition: str, padded: int, world_size: int, rank: int, device: torch.device
) -> Tensor:
    """Global positions of a rank's rows, int64 (padded / world_size,), strictly increasing."""
    ranges = partitions.get(partition).ranges(padded, world_size, rank)
    parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in ranges]
    return torch.cat(parts).sort().values


@lru_cache(maxsize=16)
def _seen_by(
    mask: Mask, partition: str, padded: int, world_size: int, rank: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    boundaries = None
    if mask.documents is not None:
        boundaries = torch.tensor(mask.documents, device=device)
    return visible_range(
        positions(partition, padded, world_size, rank, device),
        mask.seq_len,
        causal=mask.causal,
        window=mask.window,
        cu_seqlens=boundaries,
    )
