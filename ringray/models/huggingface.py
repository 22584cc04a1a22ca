"""Ring attention for Hugging Face models: ``attn_implementation="ringray"``.

An unmodified Llama-style model runs on this rank's shard of every sequence. ``shard_batch`` deals
the tokens, adds their positions and a ``Ring``, the keyword argument that transformers passes
through the model to its attention layers (in layers recomputed by gradient checkpointing too, which
a context manager would not reach)::

    hf.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringray")
    batch = hf.shard_batch(model, input_ids, labels=labels)  # this rank's rows of it
    model(**batch).loss.backward()  # then sum losses and gradients over the ring

Attention that a ring cannot compute is refused, by the same rule on every rank.

Shape legend: B batch, S global length, R rows of one shard, Hq query heads, Hkv key/value heads,
D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention import ring_attention
from ringray.attention.arguments import document_boundaries
from ringray.attention.sharding import shard
from ringray.comm.ring import connect
from ringray.models.huggingface_masks import no_mask
from ringray.traffic.geometry import Mask
from ringray_kernels.config import Blocks

NAME = "ringray"
IGNORED = -100  # label that transformers' losses skip

# Arguments of attention layers that a ring does not compute, and the reason or the remedy.
_REFUSED = {
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


@dataclass(frozen=True)
class Ring:
    """The layout of one batch on a ring; the ``ring`` argument of the model's forward.

    ``shard_batch`` makes it; make one yourself if a data loader deals the tokens.

    ``seq_len``: true global length (tokens). ``cu_seqlens``: boundaries of packed documents from 0
    to ``seq_len``, shared by all batch rows, or None. The others are as in
    ``ringray.ring_attention``.
    """

    seq_len: int
    cu_seqlens: tuple[int, ...] | None = None
    group: dist.ProcessGroup | None = None
    partition: str = partitions.DEFAULT
    transport: str = transports.DEFAULT
    backend: str = "auto"
    blocks: Blocks | int | None = None


def register() -> None:
    """Registers ``attn_implementation="ringray"`` with transformers; once per process is enough."""
    AttentionInterface.register(NAME, _attention)
    # Without a mask function of its own, transformers would silently drop a padding mask.
    AttentionMaskInterface.register(NAME, no_mask)


def shard_batch(
    model: nn.Module,
    input_ids: Tensor,
    *,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    partition: str = partitions.DEFAULT,
    gradients: Literal["sum", "mean"] = "sum",
    transport: str = transports.DEFAULT,
    backend: str = "auto",
    blocks: Blocks | int | None = None,
) -> dict[str, Any]:
    """Returns this rank's part of a batch that every rank holds: arguments of the model's forward.

    Labels are shifted here, before dealing: a shard does not hold the next token of each of its
    rows. The model's own loss is then this rank's part of the loss per token of the whole batch;
    the parts of all ranks sum to it.

    Args:
        model: the transformers model that gets the batch, or DDP around it; only its config is
            read. Other attention implementations ignore ``ring`` and would attend within the shard.
        input_ids: (B, S) integers, the same on every rank of ``group``.
        labels: (B, S) integers, not shifted, -100 where ignored, as transformers takes them; None
            for no loss. The last token of a document predicts nothing.
        position_ids: (S,), (1, S) or (B, S) integers; None counts from 0, in each document.
        cu_seqlens: boundaries of packed documents, 1-D integers from 0 to S, not decreasing, shared
            by all batch rows. None finds them as transformers does: a document begins where
            ``position_ids`` do not increase by 1.
        attention_mask: (B, S); accepted where it masks nothing.
        group, partition, transport, backend, blocks: as in ``ringray.ring_attention``.
        gradients: reduction of parameter gradients after ``backward``. ``sum``: they are summed
            over the ring. ``mean``: a wrapper averages them, as DDP and FSDP do; the losses of all
            ranks then average to the loss of the batch.

    Returns:
        ``input_ids`` and ``position_ids`` (B, R), ``use_cache`` False, ``ring``; with labels also
        ``shift_labels`` (B, R), the same as ``labels`` (which transformers requires to compute a
        loss) and ``num_items_in_batch``, the count of labels over the ring (divided by its size
        with ``mean``). Replace the last to average over replicas or accumulated batches as well.
        Padding rows hold token 0 at position 0 and are ignored by the loss.

    Raises:
        ValueError: a model with another attention implementation (two models made from one config
            object share it), shapes, boundaries or names that do not fit, documents that differ
            between batch rows, or an ``attention_mask`` that masks something.
    """
    _check_attends_by_ring(model)
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError(f"input_ids: got {_said(input_ids)}, expected integers (B, S)")
    if gradients not in ("sum", "mean"):
        raise ValueError(f"gradients: got {gradients!r}, expected 'sum' or 'mean'")
    seq_len = input_ids.shape[1]
    if attention_mask is not None:
        _check_masks_nothing(attention_mask, input_ids)
    documents = document_boundaries(cu_seqlens, seq_len)
    Mask(seq_len, causal=True, window=None, documents=documents)  # checks the boundaries
    if position_ids is None:
        position_ids = _positions(seq_len, documents, input_ids.device)
    elif position_ids.shape not in {(seq_len,), (1, seq_len), input_ids.shape}:
        raise ValueError(
            f"position_ids: got {_said(position_ids)}, expected integers of shape ({seq_len},), "
            f"(1, {seq_len}) or {tuple(input_ids.shape)}"
        )
    position_ids = position_ids.expand_as(input_ids)
    if cu_seqlens is None:
        documents = _documents(position_ids)
    ring = Ring(seq_len, documents, group, partition, transport, backend, blocks)

    def rows(x: Tensor, pad_value: int) -> Tensor:
        return shard(x, dim=1, partition=partition, group=group, pad_value=pad_value)

    batch: dict[str, Any] = {
        "input_ids": rows(input_ids, 0),
        "position_ids": rows(position_ids, 0),
        "use_cache": False,
        "ring": ring,
    }
    if labels is not None:
        if labels.shape != input_ids.shape or labels.is_floating_point():
            raise ValueError(
                f"labels: got {_said(labels)}, expected integers {tuple(input_ids.shape)}"
            )
        shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        shifted[:, [end - 1 for end in documents or () if end > 0]] = IGNORED
        counted = (shifted != IGNORED).sum().clamp(min=1)
        size = connect(group).world_size
        batch["labels"] = batch["shift_labels"] = rows(shifted, IGNORED)
        batch["num_items_in_batch"] = counted if gradients == "sum" else counted / size
    return batch


def _check_attends_by_ring(model: nn.Module) -> None:
    config = getattr(getattr(model, "module", model), "config", None)
    given = getattr(config, "_attn_implementation", None)
    if given != NAME:
        raise ValueError(
            f"model: attends by {given!r}, expected {NAME!r}; make it with "
            f"attn_implementation={NAME!r}, from a config that no other model shares"
        )


def _said(x: Tensor) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}"


def _check_masks_nothing(attention_mask: Tensor, input_ids: Tensor) -> None:
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: got {_said(attention_mask)}, expected {tuple(input_ids.shape)}"
        )
    if not attention_mask.bool().all():
        raise ValueError(
            "attention_mask: it masks some tokens. Padding on the right needs no mask, as a causal "
            f"token sees nothing after it: omit the mask and set labels there to {IGNORED}. "
            "Instead of other padding, pack documents: cu_seqlens"
        )


def _positions(seq_len: int, documents: tuple[int, ...] | None, device: torch.device) -> Tensor:
    """Returns positions, int64 (S,), from 0 in each document."""
    positions = torch.arange(seq_len, device=device)
    if documents is None:
        return positions
    cu = torch.tensor(documents, device=device)
    return positions - torch.repeat_interleave(cu[:-1], cu.diff())


def _documents(position_ids: Tensor) -> tuple[int, ...] | None:
    """Returns boundaries where positions (B, S) do not increase by 1; None if they always do."""
    begins = position_ids.diff(dim=1) != 1
    if not (begins == begins[:1]).all():
        raise ValueError(
            "position_ids: documents begin at other tokens in some batch rows, but a ring shares "
            "their boundaries between all rows; put one sequence in a batch, or give cu_seqlens"
        )
    starts = (begins[0].nonzero().flatten() + 1).tolist()
    return (0, *starts, position_ids.shape[1]) if starts else None


def _attention(
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

    query (B, Hq, R, D), key and value (B, Hkv, R, D); returns (B, R, Hq, D) and no weights.
    ``sliding_window`` counts the keys that a query sees, its own included.
    """
    if not isinstance(ring, Ring):
        raise ValueError(
            f"ring: {type(module).__name__} got {type(ring).__name__}, expected a Ring: call the "
            "model with **shard_batch(model, ...), or with ring=Ring(...) on rows dealt otherwise"
        )
    if attention_mask is not None:
        raise ValueError(
            f"attention_mask: got {_said(attention_mask)}, expected None; a ring masks by "
            "causality, sliding window and documents only"
        )
    if dropout:
        raise ValueError(
            f"dropout: got {dropout}, expected 0: set the attention dropout of the model's config"
        )
    for name, why in _REFUSED.items():
        given = more.get(name)
        if given is not None and given is not False:
            raise ValueError(f"{name}: got {type(given).__name__}, expected None: {why}")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"key: got {key.shape[2]} rows for {query.shape[2]} queries, expected as many: a ring "
            "has neither KV cache nor cross attention"
        )
    if torch.is_autocast_enabled(query.device.type):
        # RoPE leaves queries and keys in fp32; autocast would cast them for SDPA too.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
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
    return cast("Tensor", out).transpose(1, 2).contiguous(), None
