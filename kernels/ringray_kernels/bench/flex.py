"""FlexAttention as a contender: a block mask from intervals, compiled once per point."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ringray_kernels.bench.problems import Point
from ringray_kernels.flex_blocks import in_blocks


def _mask_mod(point: Point, device: torch.device) -> Callable[..., Tensor]:
    """Returns the causal mask as users of FlexAttention write it."""
    window, document = point.window, None
    if point.mask == "documents":
        bounds = torch.tensor(point.boundaries, device=device)
        positions = torch.arange(point.seq_len, device=device)
        document = torch.searchsorted(bounds, positions, right=True).int()

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q >= k
        if window is not None:
            seen = seen & (q - k <= window)
        if document is not None:
            seen = seen & (document[q] == document[k])
        return seen

    return visible


def block_mask(point: Point, device: torch.device) -> BlockMask | None:
    """Returns the partly and the wholly visible blocks, or None if all pairs are visible."""
    if point.mask == "full":
        return None
    return in_blocks([point.visible(device)], _mask_mod(point, device))


@lru_cache(maxsize=1)
def _compiled(
    point: Point, device: torch.device, tuned: bool
) -> tuple[Callable[..., Any], BlockMask | None]:
    import torch._functorch.config as functorch

    # A repeated backward pass must keep its buffers.
    functorch.donated_buffer = False
    # Earlier shapes would count against the recompile limit.
    torch._dynamo.reset()
    mode = "max-autotune-no-cudagraphs" if tuned else None
    return torch.compile(flex_attention, dynamic=False, mode=mode), block_mask(point, device)


def flex(point: Point, q: Tensor, k: Tensor, v: Tensor, *, tuned: bool = False) -> Tensor:
    """Computes FlexAttention of (1, heads, S, D); shared heads by its own flag. ``tuned``: in the
    fastest of its own block sizes, with bulk copies forward, which are off by default."""
    function, mask = _compiled(point, q.device, tuned)
    options = {"scale": point.scale, "enable_gqa": point.heads != point.kv_heads}
    bulk = {"fwd_USE_TMA": True} if tuned else None
    out: Tensor = function(q, k, v, block_mask=mask, kernel_options=bulk, **options)
    return out
