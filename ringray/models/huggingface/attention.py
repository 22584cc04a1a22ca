"""Attention of transformers' layers, by ``ring_attention``.

Shape legend: B batch, R rows of one shard, Hq query heads, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringray.attention import ring_attention
from ringray.models.huggingface.ring import Ring, Running, said

# Arguments of attention layers that a ring does not compute, and the reason or the remedy.
REFUSED = {
    "output_attentions": "a ring never holds the attention weights",
    "use_cache": "a ring keeps no KV cache and does not generate; pass use_cache=False",
    "cache": "a ring keeps no KV cache and does not generate",
    "softcap": "soft-capped scores are not implemented",
    "s_aux": "attention sinks are not implemented",
    "sinks": "attention sinks are not implemented",
    "position_bias": "biased scores are not implemented",
    "indices": "attention to chosen keys is not implemented",
    "block_indices": "attention to chosen keys is not implemented",
    "cu_seq_lens_q": "a shard does not hold whole documents; give cu_seqlens to shard_batch",
    "cu_seqlens": "a shard does not hold whole documents; give cu_seqlens to shard_batch",
}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ring: Ring | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Computes attention for an attention layer of transformers.

    query (B, Hq, R, D), key and value (B, Hkv, R, D), where value may have another D; returns
    (B, R, Hq, D) and no weights. ``sliding_window`` counts the keys that a query sees, its own
    included.
    """
    forward = None if torch.compiler.is_compiling() else Running.forward
    if ring is None and forward is not None:  # the model does not pass it on
        ring = forward.ring
    _check(module, query, key, ring, dropout, more)
    assert ring is not None
    if forward is not None:
        forward.calls += 1
        if forward.alone:
            return _alone(query, value, attention_mask, sliding_window), None
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask: got {said(attention_mask)}, expected None; a ring masks by "
            "causality, sliding window and documents only"
        )
    if torch.is_autocast_enabled(query.device.type):
        # RoPE leaves queries and keys in fp32; autocast would cast them for SDPA too.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    width, of_values = query.shape[-1], value.shape[-1]
    if width != of_values:  # zeros change neither scores nor sums
        scaling = width**-0.5 if scaling is None else scaling
        wide = max(width, of_values)
        query, key, value = (F.pad(x, (0, wide - x.shape[-1])) for x in (query, key, value))
    out = ring_attention(
        query,
        key,
        value,
        group=ring.group,
        partition=ring.partition,
        causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        window=None if sliding_window is None else sliding_window - 1,
        cu_seqlens=None if ring.cu_seqlens is None else torch.tensor(ring.cu_seqlens),
        seq_len=ring.seq_len,
        scale=scaling,
        transport=ring.transport,
        backend=ring.backend,
        blocks=ring.blocks,
    )
    return cast("Tensor", out)[..., :of_values].transpose(1, 2).contiguous(), None


def _check(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    ring: Ring | None,
    dropout: float,
    more: dict[str, Any],
) -> None:
    """Raises ValueError for a layer's arguments that a ring cannot compute."""
    if not isinstance(ring, Ring):
        raise ValueError(
            f"ring: {type(module).__name__} got {type(ring).__name__}, expected a Ring: call the "
            "model with **shard_batch(model, ...), or with ring=Ring(...) on rows dealt otherwise; "
            "without gradient checkpointing, where layers do not pass the ring on. "
            "generate() is not supported, as a ring keeps no KV cache: generate with the same "
            "weights after model.set_attn_implementation('sdpa')"
        )
    if not hasattr(module, "checked_by_ringray"):
        raise ValueError(
            f"ring: {type(module).__name__} is not of a checked model; call check(model, ring) "
            "once on every rank, as shard_batch does, before a forward with a Ring of your own"
        )
    if dropout:
        raise ValueError(
            f"dropout: got {dropout}, expected 0: set the attention dropout of the model's config"
        )
    for name, why in REFUSED.items():
        given = more.get(name)
        if given is not None and given is not False:
            raise ValueError(f"{name}: got {type(given).__name__}, expected None: {why}")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key: got {key.shape[2]} rows for {query.shape[2]} queries, expected as many: a ring "
            "has neither KV cache nor cross attention"
        )


def _alone(
    query: Tensor, value: Tensor, attention_mask: Tensor | None, sliding_window: int | None
) -> Tensor:
    """Returns the values (B, R, Hq, D): attention in which every token sees itself.

    The mask holds the window of this layer, as ``masks.no_mask`` makes it for this purpose; a layer
    has to pass the same one, as a ring computes the window of the layer.
    """
    masked = 0 if attention_mask is None else int(attention_mask.flatten()[0])
    if attention_mask is not None and masked != (sliding_window or 0):
        raise ValueError(
            f"sliding_window: the layer passes {sliding_window} to its attention, and its mask has "
            f"{masked or None}, expected the same: a ring takes the window of the layer"
        )
    values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return values.transpose(1, 2).contiguous()
