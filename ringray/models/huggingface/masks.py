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

from ringray.models.huggingface.ring import Running

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
) -> Tensor | None:
    """Replaces the dense mask of transformers; raises ValueError for a mask that a ring lacks.

    A forward refuses masks of its caller; ``attention_mask`` is of the model's own making. While
    the model is checked for tokens that mix otherwise it may mask nothing, and the result is a mask
    (1, 1, Q, K) of one number: the window, or 0 without one.
    """
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
    if torch.compiler.is_compiling() or Running.forward is None or not Running.forward.alone:
        return None
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            "attention_mask: the model makes one of its own that masks padding tokens, expected "
            "none; a ring masks by causality, sliding window and documents only"
        )
    window = float(more.get("local_size") or 0)
    return torch.full((1, 1, 1, 1), window, device=more.get("device")).expand(
        1, 1, q_length, kv_length
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
