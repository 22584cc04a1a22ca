"""PyTorch's FlexAttention in one process, compiled; its blocks follow from the intervals."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ringray.lab.kinds.base import RankContext, visible_keys
from ringray.lab.trial.config import TrialConfig
from ringray_kernels.flex_blocks import in_blocks


def prepare(
    config: TrialConfig, context: RankContext, q: Tensor, k: Tensor, v: Tensor
) -> Callable[[], Tensor]:
    """Returns a function that attends; its first call compiles."""
    mask = _block_mask(config, context.device)
    compiled = torch.compile(flex_attention, dynamic=False)

    grouped = config.problem.heads != config.problem.kv_heads

    def attend() -> Tensor:
        out: Tensor = compiled(q, k, v, block_mask=mask, enable_gqa=grouped)
        return out

    return attend


def _block_mask(config: TrialConfig, device: torch.device) -> BlockMask | None:
    ranges = visible_keys(config.problem, device)

    def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = query < 0
        for low, high in ranges:
            visible = visible | (key >= low[query]) & (key < high[query])
        return visible

    if config.problem.mask.plain:
        return in_blocks(ranges, causal) if config.problem.causal else None
    return in_blocks(ranges, seen)
