"""Tile plans: the tiles that each block visits, heaviest block first.

A plan follows from the intervals and the tile size alone. It is made on the device without waiting
for it, and kept with the intervals, so that all layers and heads share it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ringray_kernels.intervals import derived

COLUMNS = 8


def tile_plan(start: Tensor, end: Tensor, rows: int, tile: int) -> Tensor:
    """Returns the plan of blocks of ``rows`` rows in tiles of ``tile``; int32 (1 + blocks, 8).

    The first row holds the number of blocks that see anything, and of all. Each further row is a
    block, those with more tiles first: batch entry of the bounds, block, low, high, leading tiles,
    whole tiles, all tiles (see ``tiles.plan_tiles``), and whether some rows of ``[low, high)`` may
    be seen by no row of the block."""
    return derived(start, end, ("plan", rows, tile), partial(_made, start, end, rows, tile))


def _by_block(start: Tensor, end: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Returns the intervals of each block, (batch * blocks, rows); the last row is repeated."""
    length = start.shape[1]
    count = -(-length // rows) * rows
    row = torch.arange(count, dtype=torch.int64, device=start.device).clamp_(max=length - 1)
    return start[:, row].view(-1, rows), end[:, row].view(-1, rows)


def _spans(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    seen = first < last
    high = last.where(seen, 0).amax(1)
    return torch.minimum(first.where(seen, torch.iinfo(torch.int32).max).amin(1), high), high


def _made(start: Tensor, end: Tensor, rows: int, tile: int) -> Tensor:
    first, last = _by_block(start, end, rows)
    low, high = _spans(first, last)
    count = (high - low + tile - 1) // tile
    whole_low, whole_high = first.amax(1), torch.minimum(last.amin(1), high)
    leading = torch.minimum(((whole_low - low).clamp(min=0) + tile - 1) // tile, count)
    whole = ((whole_high - low).clamp(min=0) // tile - leading).clamp(min=0)
    gaps = (first[:, 1:] > last[:, :-1]).any(1)
    index = torch.arange(len(first), device=start.device, dtype=start.dtype)
    blocks = len(first) // len(start)
    entry, block = index // blocks, index % blocks
    columns = (entry, block, low, high, leading, whole, count, gaps.to(low.dtype))
    # The heaviest blocks start first, so that none of them runs alone at the end.
    heaviest_first = torch.argsort(count, descending=True, stable=True)
    head = torch.zeros(1, COLUMNS, device=start.device, dtype=start.dtype)
    head[0, 0], head[0, 1] = (count > 0).sum(), len(first)
    return torch.cat([head, torch.stack(columns, 1)[heaviest_first]])
