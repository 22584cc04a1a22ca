"""One rank's share of one attention problem: positions, intervals and walks, cached per geometry.

Shape legend: B batch, Hq query heads, Hkv key/value heads, S rows of one shard, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringray.traffic import script, walk
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask
from ringray.traffic.script import Script
from ringray.traffic.walk import Backward, Costs, Pass, Rows, Walks
from ringray.transport import Exchange
from ringray_kernels.config import Blocks
from ringray_kernels.intervals import intervals, visible_range


@dataclass(frozen=True)
class RankProblem:
    """The problem of one rank; equal on all ranks except for ``rank``.

    ``layout``: positions on the ring in which chunks walk. ``rank``: of that ring. ``costs``: bytes
    of a travelling row.
    """

    layout: Layout
    rank: int
    mask: Mask
    exchange: Exchange
    backward: Backward
    costs: Costs
    scale: float
    backend: str
    blocks: Blocks | int | None
    return_lse: bool = False
    softcap: float | None = None

    @property
    def kernel(self) -> dict[str, Any]:
        """Returns the keywords of all calls of ``ringray_kernels``."""
        return {
            "scale": self.scale,
            "softcap": self.softcap,
            "blocks": self.blocks,
            "backend": self.backend,
        }

    @property
    def own(self) -> Rows:
        """Returns all rows of this rank."""
        return Rows(0, self.layout.rows)

    @property
    def walks(self) -> Walks:
        """Returns the walks of both passes; raises ``walk.Unwalkable`` if ``backward`` is
        impossible."""
        return walk.choose(self.layout, self.mask, self.exchange.routes, self.backward, self.costs)

    def script(self, which: Pass) -> Script:
        """Returns this rank's part of one pass."""
        walks = self.walks
        moved = walks.forward if which == "forward" else walks.backward
        return script.write(moved, which, self.layout.rows, self.rank)

    def positions(self, rank: int, device: torch.device) -> Tensor:
        """Returns the global positions of a rank of the ring, int64, strictly increasing."""
        return positions(self.layout, rank, device)

    def intervals(
        self, queries: int, rows: Rows, owner: int, keys: Rows, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Returns ``start``, ``end``, int32 (B or 1, rows): the range of ``owner``'s rows ``keys``
        that each of the rows ``rows`` of the rank ``queries`` sees."""
        chosen = positions(self.layout, owner, device)[keys.start : keys.stop]
        return self.intervals_of(queries, rows, chosen)

    def intervals_of(self, queries: int, rows: Rows, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the same as ``intervals`` for keys at any strictly increasing positions."""
        part = slice(rows.start, rows.stop)
        seen = _seen_by(self.mask, self.layout, queries, keys.device)
        low, high = (x[:, part].contiguous() for x in seen)
        return intervals(low, high, keys)


@lru_cache(maxsize=128)
def positions(layout: Layout, rank: int, device: torch.device) -> Tensor:
    """Returns the global positions of a rank's rows, int64 (rows,), strictly increasing; not to be
    changed."""
    with torch.inference_mode(False):  # autograd may save them in a later call
        parts = [torch.arange(r.start, r.stop, r.step, device=device) for r in layout.ranges(rank)]
        return torch.cat(parts).sort().values


@lru_cache(maxsize=64)
def _seen_by(mask: Mask, layout: Layout, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    at = positions(layout, rank, device)
    each = [visible_range(at, mask.seq_len, **keywords(row, device)) for row in mask.rows]
    low, high = map(torch.stack, zip(*each, strict=True))
    return low, high


def keywords(mask: Mask, device: torch.device | str) -> dict[str, Any]:
    """Returns a mask, except its length, as the arguments of ``ring_attention`` and of
    ``visible_range``."""
    documents = mask.documents
    return {
        "causal": mask.causal,
        "window": mask.window,
        "cu_seqlens": None if documents is None else torch.tensor(documents, device=device),
        "chunk": mask.chunk,
        "prefix": mask.prefix,
    }
