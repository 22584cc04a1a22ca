"""Attention of transformers' layers, by ``ring_attention``.

Shape legend: B batch, R rows of one shard, Hq query heads, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ringray.attention import ring_attention
from ringray.attention.decode import ring_decode
from ringray.attention.sharded_kv import ShardedKV
from ringray.attention.sharding import local_positions
from ringray.comm.ring import place_in
from ringray.models.huggingface.masks import reach
from ringray.models.huggingface.ring import CACHE, Ring, said
from ringray.models.huggingface.running import Running

# Arguments of attention layers that a ring does not compute, and the reason or the remedy.
REFUSED = {
    "output_attentions": "a ring never holds the attention weights",
    "use_cache": "a ring keeps no KV cache but that of generate; pass use_cache=False",
    "cache": "a ring keeps no KV cache but that of generate",
    "sinks": "attention sinks of each token are not implemented",
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Computes attention for an attention layer of transformers.

    query (B, Hq, R, D), key and value (B, Hkv, R, D), where value may have another D; returns
    (B, R, Hq, D) and no weights. ``sliding_window`` counts the keys that a query sees, its own
    included; in a layer that is not causal it does so on each side. ``s_aux`` (Hq,) are attention
    sinks.
    """
    forward = None if torch.compiler.is_compiling() else Running.forward
    if ring is None and forward is not None:  # the model does not pass it on
        ring = forward.ring
    _check(module, query, key, ring, arguments)
    assert ring is not None
    if forward is not None:
        forward.calls += 1
        if forward.alone:
            return _alone(query, value, attention_mask, _seen(module, sliding_window)), None
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask: got {said(attention_mask)}, expected None; a ring masks by "
            "causality, sliding window, chunk, prefix and documents only"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window, chunk = _seen(module, sliding_window)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux}
    options |= {"group": ring.group, "window": window, "backend": ring.backend}
    held = getattr(key, CACHE, None)
    if held is not None or (forward is not None and forward.stepping):
        if not isinstance(held, ShardedKV) or not causal or chunk or isinstance(window, tuple):
            raise ValueError(
                f"past_key_values: {type(module).__name__} attends with a cache to other keys than "
                "this returns, in chunks or not causally; expected them as they are, with "
                "causality and a sliding window only"
            )
        if dropout:
            raise ValueError(f"dropout: got {dropout} with a cache, expected 0: call model.eval()")
        new = ring_decode(query, held, **options)
        return cast("Tensor", new).transpose(1, 2).contiguous(), None
    query = _at_own_temperature(module, query, ring)
    if torch.is_autocast_enabled(query.device.type):
        # RoPE leaves queries and keys in fp32; autocast would cast them for SDPA too.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    of_ring = ("partition", "prefix", "cu_seqlens", "seq_len", "transport", "blocks")
    options |= {name: getattr(ring, name) for name in of_ring}
    out = ring_attention(
        query, key, value, causal=causal, chunk=chunk, dropout_p=dropout, **options
    )
    return cast("Tensor", out).transpose(1, 2).contiguous(), None


def _seen(
    module: nn.Module, sliding_window: int | None
) -> tuple[int | tuple[int, int] | None, int | None]:
    """Returns window and chunk of a layer. Layers name no chunk, but their config their kind."""
    window: int | tuple[int, int] | None = None if sliding_window is None else sliding_window - 1
    if isinstance(window, int) and not getattr(module, "is_causal", True):
        window = (window, window)
    config: Any = getattr(module, "config", None)
    index = getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None) or ()
    if index is None or index >= len(kinds) or kinds[index] != "chunked_attention":
        return window, None
    return window, config.attention_chunk_size


def _at_own_temperature(module: nn.Module, query: Tensor, ring: Ring) -> Tensor:
    """Returns queries of a layer without RoPE that multiplies them by a number which grows with the
    position (Llama 4), for which it takes the row: in a shard another one."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    (rank, ranks), layer = place_in(ring.group), cast("Any", module)
    rows = torch.arange(query.shape[2], dtype=torch.int64, device=query.device)
    own = local_positions(ring.partition, ring.seq_len, ranks, rank).to(query.device)
    taken, wanted = (
        torch.log1p(torch.floor((x.float() + 1) / layer.floor_scale)) * layer.attn_scale + 1
        for x in (rows, own)
    )
    return (query * (wanted / taken)[:, None]).to(query.dtype)


def _check(
    module: nn.Module, query: Tensor, key: Tensor, ring: Ring | None, arguments: dict[str, Any]
) -> None:
    """Raises ValueError for a layer's arguments that a ring cannot compute."""
    if not isinstance(ring, Ring):
        raise ValueError(
            f"ring: {type(module).__name__} got {type(ring).__name__}, expected a Ring: call the "
            "model with **shard_batch(model, ...), or with ring=Ring(...) on rows dealt otherwise; "
            "without gradient checkpointing, where layers do not pass the ring on. "
            "Generate with ringray.models.huggingface.generate, which keeps a cache on the ring"
        )
    if not hasattr(module, "checked_by_ringray"):
        raise ValueError(
            f"ring: {type(module).__name__} is not of a checked model; call check(model, ring) "
            "once on every rank, as shard_batch does, before a forward with a Ring of your own"
        )
    for name, why in REFUSED.items():
        argument = arguments.get(name)
        cached = name == "use_cache" and getattr(Running.forward, "stepping", hasattr(key, CACHE))
        if argument is not None and argument is not False and not cached:
            raise ValueError(f"{name}: got {type(argument).__name__}, expected None: {why}")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key: got {key.shape[2]} rows for {query.shape[2]} queries, expected as many: a ring "
            "has neither KV cache nor cross attention"
        )


def _alone(
    query: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    seen: tuple[int | tuple[int, int] | None, int | None],
) -> Tensor:
    """Returns the values (B, R, Hq, D): attention in which every token sees itself.

    The mask holds the reach of this layer, as ``masks.no_mask`` makes it for this purpose; a layer
    has to have the same one, as a ring computes window and chunk of the layer.
    """
    masked = None if attention_mask is None else float(attention_mask.flatten()[0])
    if masked is not None and masked != reach(*seen):
        kind = "chunk" if masked % 1 else "window to both sides" if masked < 0 else "window"
        raise ValueError(
            f"sliding_window: the layer has a window of {seen[0]} and a chunk of {seen[1]}, and "
            f"its mask a {kind} of {int(abs(masked))}, its own key included, expected the same: a "
            "ring takes those of the layer"
        )
    values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return values.transpose(1, 2).contiguous()
