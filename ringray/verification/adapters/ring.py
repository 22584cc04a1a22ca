"""Our ring: Hugging Face models by ``shard_batch``, modules with our attention as they are, and
others in ``ringray.context_parallel``, which routes their ``scaled_dot_product_attention``."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn

import ringray
from ringray.nn import ContextParallelAttention
from ringray.verification import defaults

_PADDING = {"labels": -100, "shift_labels": -100}
_SEQUENCE = 1  # dimension of (B, S)
_kind = "sdpa"
_whole: dict[str, Any] = {}


def prepare(model: nn.Module) -> nn.Module:
    """Puts a Hugging Face model on the ring, and learns which kind the model is."""
    global _kind
    hf = sys.modules.get("transformers.modeling_utils")  # imported where there is such a model
    if hf is not None and isinstance(model, hf.PreTrainedModel):
        from ringray.models import huggingface

        huggingface.register()
        model.set_attn_implementation(huggingface.NAME)
        _kind = "huggingface"
        _whole["model"] = model
    elif any(isinstance(part, ContextParallelAttention) for part in model.modules()):
        _kind = "module"
    return model


def shard(batch: dict[str, Any]) -> dict[str, Any]:
    """Deals a batch by the default partition."""
    _whole["seq_len"] = batch["input_ids"].shape[_SEQUENCE]
    _whole["cu_seqlens"] = batch.get("cu_seqlens")
    if _kind == "huggingface":
        from ringray.models import huggingface

        names = "input_ids", "labels", "position_ids", "cu_seqlens"
        options = {name: batch[name] for name in names if name in batch}
        return huggingface.shard_batch(_whole["model"], gradients="mean", **options)
    dealt = {
        name: ringray.shard(x, dim=_SEQUENCE, pad_value=_PADDING.get(name, 0))
        for name, x in batch.items()
        if x.dim() > 1
    }
    others = {name: x for name, x in batch.items() if x.dim() < 2}
    return dealt | others | {"seq_len": _whole["seq_len"]}


def context() -> AbstractContextManager[Any]:
    """Routes attention over the ring, where the model does not do so itself."""
    if _kind != "sdpa" or dist.get_world_size() == 1:
        return nullcontext()
    return ringray.context_parallel(seq_len=_whole["seq_len"], cu_seqlens=_whole["cu_seqlens"])


step = defaults.step
