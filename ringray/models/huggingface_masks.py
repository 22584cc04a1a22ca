"""Masks that transformers' models build, and whether a ring computes them.

A ring masks by causality, window and documents, from the arguments of the attention layer. Here it
is made sure that the model means no more than that.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# The mask functions of transformers.masking_utils that a ring computes, from the arguments of the
# attention layer and from its own documents. A model that builds another one means more than that.
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
    """What transformers calls in place of making a dense mask; refuses what a ring cannot mask."""
    if attention_mask is not None:
        # Even one that masks nothing: what this shard's mask holds, other ranks cannot know.
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
    """Names of a mask function and of those that it is composed of."""
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
    """As ``_named``, for ``torch.compile``, which does not let one look into closures: the function
    itself, and what it is told to be composed of."""
    found = [function.__code__.co_qualname]
    if use_vmap:  # transformers' sign that the model brought a function of its own
        found.append("a mask function of the model")
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        found.append("chunked_overlay")
    return found
