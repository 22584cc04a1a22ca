"""PyTorch's scaled_dot_product_attention in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringray.lab.kinds.base import RankContext, visible
from ringray.lab.trial.config import TrialConfig


def prepare(
    config: TrialConfig, context: RankContext, q: Tensor, k: Tensor, v: Tensor
) -> Callable[[], Tensor]:
    """Returns a function that attends; other masks than causal are dense, as SDPA takes them."""
    problem, mask = config.problem, None
    if not problem.mask.plain:
        unseen = ~visible(problem, context.device)
        mask = torch.zeros(unseen.shape, dtype=q.dtype, device=q.device)
        mask.masked_fill_(unseen, -torch.inf)

    def attend() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=problem.causal and mask is None,
            enable_gqa=problem.heads != problem.kv_heads,
        )

    return attend
