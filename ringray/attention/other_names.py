"""Keywords of other libraries: what ringray calls them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from ringray.attention.agreement import refusing
from ringray.attention.tensor_arguments import BIASES
from ringray.base.errors import suggestion
from ringray.comm.ring import connect

P = ParamSpec("P")
R = TypeVar("R")

# Names of other libraries -> what this one calls it.
_OTHER_NAMES = {
    "query": "q", "key": "k", "value": "v", "is_causal": "causal", "softmax_scale": "scale",
    "sm_scale": "scale", "window_size": "window (w for window_size=(w, 0))",
    "sliding_window": "window (w - 1 for w keys)", "attention_chunk_size": "chunk",
    "attention_chunk": "chunk",
    "prefix_length": "prefix", "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens", "cu_seqlens_kv": "cu_seqlens", "process_group": "group",
    "pg": "group", "mesh": "group (mesh.get_group())", "device_mesh": "group (mesh.get_group())",
    "return_attn_probs": "return_lse", "return_softmax_lse": "return_lse",
    "attn_mask": "causal, window, chunk, prefix, global_tokens, shared_prefix, cu_seqlens or "
    "seq_len: there are no other masks",
    "global_attention_mask": "global_tokens (the first positions)",
    "shared_prefix": "nothing: a prompt of many answers goes with ring_attention alone",
    "token_type_ids": "prefix (the length of what all tokens see)",
    "enable_gqa": "nothing: K/V heads are shared wherever there are fewer; leave it out",
    "dropout": "dropout_p", "dropout_rate": "dropout_p", "attention_dropout": "dropout_p",
    "deterministic": "nothing: results are always bitwise repeatable; leave it out",
    "max_seqlen": "nothing: leave it out", "max_seqlen_q": "nothing: leave it out",
    "max_seqlen_k": "nothing: leave it out",
    "s_aux": "sinks", "learnable_sink": "sinks", "attn_sink": "sinks",
    "logits_soft_cap": "softcap", "logit_softcapping": "softcap",
    "position_bias": "distance_bias: a table of distances, from which T5's buckets are indexed",
    "heads_k_stride": "transport (allgather:N for N heads at once)",
    # Of functions without them.
    **dict.fromkeys(BIASES, "nothing: no scores are biased here; decode in one process"),
}  # fmt: skip


def answering_other_names(function: Callable[P, R]) -> Callable[P, R]:
    """Lets ``function`` raise a ValueError, on every rank, for a keyword that it does not have,
    which says what ringray calls it."""
    parameters = inspect.signature(function).parameters
    required = [name for name, x in parameters.items() if x.default is x.empty]
    names = frozenset(parameters)  # which a compiler can trace

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        strange = [name for name in kwargs if name not in names]
        missing = [name for name in required[len(args) :] if name not in kwargs]
        if not (strange or missing):
            return function(*args, **kwargs)
        if missing and not torch.compiler.is_compiling():
            with refusing(connect(cast("Any", kwargs.get("group")))):
                return function(*args, **kwargs)  # Python's own error, told to the other ranks
        name = strange[0]
        if name in _OTHER_NAMES:
            hint = f"ringray calls it {_OTHER_NAMES[name]}"
        else:  # a compiler cannot trace the search
            hint = "" if torch.compiler.is_compiling() else suggestion(name, names)
        wrong = f"{function.__name__}: got an unexpected keyword {name!r}" + (hint and f"; {hint}")
        if torch.compiler.is_compiling():
            raise ValueError(wrong)
        with refusing(connect(cast("Any", kwargs.get("group")))):
            raise ValueError(wrong)

    return call
