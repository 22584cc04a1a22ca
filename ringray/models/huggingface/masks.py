"""Masks of transformers' models: a check that a ring computes them.

A ring masks by causality, window, chunk and documents, from the arguments and the kind of the
attention layer. Models that build any other mask are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringray.models.huggingface.running import Running

# Mask functions of transformers.masking_utils that a ring computes, from the arguments of the
# attention layer and from its own documents.
_COMPUTED = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "and_masks.<locals>.and_mask",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    "chunked_overlay.<locals>.inner_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
    "remap_positions_for_packed_sequence.<locals>.inner_mask",
}


def no_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """Replaces the dense mask of transformers; raises ValueError for a mask that a ring lacks.

    A forward refuses masks of its caller; ``attention_mask`` is of the model's own making. While
    the model is checked for tokens that mix otherwise it may mask nothing, and the result is a mask
    (1, 1, Q, K) of one number: its ``reach``.
    """
    if kv_length != q_length:
        raise ValueError(
            f"past_key_values: {kv_length - q_length} keys before this call's {q_length}; a ring "
            "keeps no KV cache but that of huggingface.generate"
        )
    named = _named_when_traced if torch.compiler.is_compiling() else _named
    names = named(mask_function, **options)
    if unknown := [name for name in names if name not in _COMPUTED]:
        raise ValueError(
            f"mask: the model builds one of {', '.join(sorted({*unknown}))}, expected causal, "
            "sliding-window, chunked or full attention; of partly bidirectional attention there "
            "is prefix, an argument of shard_batch"
        )
    if torch.compiler.is_compiling() or Running.forward is None or not Running.forward.alone:
        return None
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            "attention_mask: the model makes one of its own that masks padding tokens, expected "
            "none; a ring masks by causality, sliding window, chunk, prefix and documents only"
        )
    size = options.get("local_size") or None
    chunk = size if any(name.startswith("chunked") for name in names) else None
    window = None if size is None or chunk else size - 1
    if window is not None and any("window_bidirectional" in name for name in names):
        window = (size, size)  # which counts the keys on each side without the own one
    device = options.get("device") or "cpu"
    mask = torch.full((1, 1, 1, 1), reach(window, chunk), dtype=torch.float32, device=device)
    return mask.expand(1, 1, q_length, kv_length)


def reach(window: int | tuple[int, int] | None, chunk: int | None) -> float:
    """Returns a number for window and chunk, another one for other masks; 0 for neither."""
    if chunk is not None:
        return chunk + 0.5
    if isinstance(window, tuple):
        return -1.0 - window[0]
    return 0.0 if window is None else 1.0 + window


def _named(function: Callable[..., Any], **_: Any) -> list[str]:
    """Lists the names of a mask function and of its components."""
    name = getattr(function, "__qualname__", repr(function))
    names = [name]
    if name in _COMPUTED:
        for value in inspect.getclosurevars(function).nonlocals.values():
            for part in value if isinstance(value, tuple) else (value,):
                if callable(part):
                    names += _named(part)
    return names


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
    names = [function.__code__.co_qualname]
    if use_vmap:  # set by transformers for a mask function of the model's own
        names.append("a mask function of the model")
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if local_size is not None and local_size not in sizes:
        names.append(f"a mask of local size {local_size}")
    return names
