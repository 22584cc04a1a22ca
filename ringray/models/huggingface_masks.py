"""Masks of transformers' models: a check that a ring computes them.

A ring masks by causality, window and documents, from the arguments of the attention layer. Models
that build any other mask are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Mask functions of transformers.masking_utils that a ring computes, from the arguments of the
# attention layer and from its own documents.
_COMPUTED = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "and_masks.<locals>.and_mask",
    "sliding_window_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
    "remap_positions_for_packed_sequence.<locals>.inner_mask",
}


def no_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **more: Any,
) -> None:
    """Replaces the dense mask of transformers; raises ValueError for a mask that a ring lacks."""
    if attention_mask is not None:
        # Also a mask that masks nothing: other ranks cannot see the values of this shard's.
        raise ValueError(
            f"attention_mask: got {attention_mask.dtype} of shape "
            f"{tuple(attention_mask.shape)}, expected None; shard_batch takes the "
            "mask of the whole batch and checks that it masks nothing"
        )
    if kv_length != q_length:
        raise ValueError(
            f"past_key_values: {kv_length - q_length} keys before this call's {q_length}; a ring "
            "keeps no KV cache and does not generate"
        )
    named = _named_when_traced if torch.compiler.is_compiling() else _named
    unknown = [name for name in named(mask_function, **more) if name not in _COMPUTED]
    if unknown:
        raise ValueError(
            f"mask: the model builds one of {', '.join(sorted({*unknown}))}, expected causal, "
            "sliding-window or full attention; chunked and partly bidirectional attention are not "
            "implemented"
        )


def _named(function: Callable[..., Any], **_: Any) -> list[str]:
    """Lists the names of a mask function and of its components."""
    name = getattr(function, "__qualname__", repr(function))
    found = [name]
    if name in _COMPUTED:
        for value in inspect.getclosurevars(function).nonlocals.values():
            for part in value if isinstance(value, tuple) else (value,):
                if callable(part):
                    found += _named(part)
    return found


def _named_when_traced(
    function: Callable[..., Any],
    *,
    config: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> list[str]:
    """Lists the same as ``_named`` for ``torch.compile``, which does not trace access to closures:
    the function itself, and components that its arguments imply."""
    found = [function.__code__.co_qualname]
    if use_vmap:  # set by transformers for a mask function of the model's own
        found.append("a mask function of the model")
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        found.append("chunked_overlay")
    return found
