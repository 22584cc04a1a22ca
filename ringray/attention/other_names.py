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

# Repeated answers.
_MASKS = (
    "causal, window, chunk, prefix, global_tokens, shared_prefix, cu_seqlens or seq_len: there are "
    "no other masks"
)
_SCORES = (
    "softcap, alibi_slopes, distance_bias or attn_bias: there are no other functions of scores, "
    "and masks have arguments of their own"
)
_SIZE = "group: the ring is as large as its process group"

# Names of other libraries -> what this one calls it.
_OTHER_NAMES = {
    # Several libraries.
    "query": "q", "key": "k", "value": "v", "is_causal": "causal", "softmax_scale": "scale",
    "sm_scale": "scale", "window_size": "window (w for window_size=(w, 0))",
    "sliding_window": "window (w - 1 for w keys)", "attention_chunk_size": "chunk",
    "attention_chunk": "chunk", "prefix_length": "prefix", "cu_seqlens_q": "cu_seqlens",
    "cu_seqlens_k": "cu_seqlens", "cu_seqlens_kv": "cu_seqlens",
    "process_group": "group", "pg": "group", "mesh": "group", "device_mesh": "group",
    "return_attn_probs": "return_lse", "return_softmax_lse": "return_lse",
    "attn_mask": _MASKS, "attention_mask": _MASKS, "mask_mod": _MASKS, "block_mask": _MASKS,
    "score_mod": _SCORES, "kernel_options": "blocks",
    "global_attention_mask": "global_tokens (the first positions)",
    "shared_prefix": "nothing: a prompt of many answers goes with ring_attention alone",
    "token_type_ids": "prefix (the length of what all tokens see)",
    "enable_gqa": "nothing: K/V heads are shared wherever there are fewer; leave it out",
    "dropout": "dropout_p", "dropout_rate": "dropout_p", "attention_dropout": "dropout_p",
    "deterministic": "nothing: results are always bitwise repeatable; leave it out",
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv"),
                    "nothing: leave it out"),
    "s_aux": "sinks", "learnable_sink": "sinks", "attn_sink": "sinks",
    "logits_soft_cap": "softcap", "logit_softcapping": "softcap",
    "position_bias": "distance_bias: a table of distances, from which T5's buckets are indexed",
    "heads_k_stride": "transport (allgather:N for N heads at once)",
    # TransformerEngine and Megatron.
    "query_layer": "q", "key_layer": "k", "value_layer": "v", "cp_group": "group",
    "cp_global_ranks": "nothing: the group knows its ranks; leave it out",
    "cp_stream": "nothing: messages have a stream of their own; leave it out",
    "cp_comm_type": "transport (ring for p2p, allgather for all_gather, ulysses for a2a, hybrid:N "
    "for a2a+p2p)",
    "qkv_format": "nothing: tensors are (B, H, S, D) with any strides; packed ones have B = 1",
    "attn_mask_type": "causal, with cu_seqlens for documents and seq_len for padding",
    **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
                    "cu_seqlens: documents of any length need no padding"),
    "pad_between_seqs": "nothing: documents need no padding; leave it out",
    "core_attention_bias": "attn_bias", "core_attention_bias_type": "attn_bias or alibi_slopes",
    "softmax_type": "sinks (zeros for off-by-one)", "fp8": "quantize, without gradients",
    **dict.fromkeys(("num_gqa_groups", "num_kv_heads"), "nothing: k has the heads; leave it out"),
    # Sizes of a ring, of Megatron and Axolotl, DeepSpeed, torchtitan, Accelerate.
    **dict.fromkeys(("context_parallel_size", "sequence_parallel_size", "sequence_parallel_degree",
                     "context_parallel_degree", "cp_size", "sp_size"), _SIZE),
    # DeepSpeed.
    "sequence_process_group": "group", "local_attention": "backend",
    **dict.fromkeys(("scatter_idx", "gather_idx"),
                    "nothing: tensors are (B, H, S, D); transport='ulysses' exchanges"),
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
