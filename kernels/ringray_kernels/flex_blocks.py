"""Block masks of FlexAttention, from intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128


def in_blocks(
    ranges: Sequence[tuple[Tensor, Tensor]], mask_mod: Callable[..., Tensor]
) -> BlockMask:
    """Returns the partly and the wholly visible blocks of queries that see ranges of keys.

    Made from the intervals: ``create_block_mask`` would compute all S x S pairs.

    Args:
        ranges: low, high, integers (S,), non-decreasing: of keys [low, high).
        mask_mod: the same mask, by its definition.
    """
    seq_len, device = len(ranges[0][0]), ranges[0][0].device
    blocks = -(-seq_len // _BLOCK)
    rows = torch.arange(blocks, dtype=torch.int64, device=device) * _BLOCK
    last = (rows + _BLOCK).clamp(max=seq_len) - 1
    columns = torch.arange(blocks, dtype=torch.int64, device=device)
    # Bounds never decrease: the first row of a block has its lowest key, the last its highest.
    touched, full = torch.zeros((2, blocks, blocks), dtype=torch.bool, device=device)
    for low, high in ranges:
        first, stop = (low[rows] // _BLOCK)[:, None], high[last][:, None]
        touched |= (columns >= first) & (columns * _BLOCK < stop)
        first, stop = low[last][:, None], high[rows][:, None]
        full |= (columns * _BLOCK >= first) & ((columns + 1) * _BLOCK <= stop)

    def listed(which: Tensor) -> tuple[Tensor, Tensor]:
        count = which.sum(-1, dtype=torch.int32)
        # Stable and descending: the listed blocks in order, then the others.
        order = torch.argsort(which.int(), dim=-1, descending=True, stable=True).int()
        return count[None, None], order[None, None].contiguous()

    return BlockMask.from_kv_blocks(
        *listed(touched & ~full),
        *listed(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(seq_len, seq_len),
    )
