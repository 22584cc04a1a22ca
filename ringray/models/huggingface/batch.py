"""This rank's part of a batch, by the rules that ``check`` has found for the model.

Shape legend: B batch, S global length, R rows of one shard.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringray.attention.documents import boundaries
from ringray.attention.sharding import local_positions, shard
from ringray.comm.ring import connect, place_in
from ringray.models.huggingface.forward import Forward
from ringray.models.huggingface.ring import IGNORED, Ring, padding_token, said
from ringray.nn import next_token_labels
from ringray_kernels.intervals import within_documents

NO_TOKEN = -2  # stands for embeddings: no token, no padding, and not the -1 of models without it


def deal(
    forward: Forward,
    ring: Ring,
    input_ids: Tensor,
    labels: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None = None,
) -> dict[str, Any]:
    """Returns the arguments of the model's forward; ``position_ids`` None: as the model counts.
    ``inputs_embeds``: in place of tokens, which then are ``NO_TOKEN``."""
    pad = padding_token(forward.model)
    if position_ids is None:
        position_ids = _positions(ring, input_ids, forward.begin, pad)
    if forward.pooled:
        if inputs_embeds is not None and forward.pool == "last":
            raise ValueError(
                "inputs_embeds: got them for a head that pools the last token, expected input_ids, "
                "in which it looks for padding"
            )
        ring = replace(ring, pooled=_holds_pooled(forward, ring, input_ids, pad))

    def rows(x: Tensor, pad_value: int, dim: int = 1) -> Tensor:
        return shard(x, dim=dim, partition=ring.partition, group=ring.group, pad_value=pad_value)

    batch: dict[str, Any] = {
        "position_ids": rows(position_ids, 0, -1),
        "use_cache": False,
        "ring": ring,
    }
    if inputs_embeds is None:
        batch["input_ids"] = rows(input_ids, (pad or 0) if forward.pooled else 0)
    else:
        batch["inputs_embeds"] = rows(inputs_embeds, 0)
    if labels is None:
        return batch
    if forward.loss is None:
        raise ValueError(forward.why)
    if forward.loss == "pooled":
        if labels.shape[:1] != input_ids.shape[:1] or labels.dim() > 2:
            raise ValueError(f"labels: got {said(labels)}, expected one of each batch row")
        return batch | {"labels": labels}
    if labels.shape != input_ids.shape or labels.is_floating_point():
        raise ValueError(f"labels: got {said(labels)}, expected integers {tuple(input_ids.shape)}")
    if forward.shifted:
        labels = next_token_labels(labels, ring.cu_seqlens, ignore_index=IGNORED)
        batch["shift_labels"] = rows(labels, IGNORED)
    batch["labels"] = rows(labels, IGNORED)
    counted = (labels != IGNORED).sum().clamp(min=1)
    size = connect(ring.group).world_size
    batch["num_items_in_batch"] = counted if ring.gradients == "sum" else counted / size
    return batch


def _positions(ring: Ring, input_ids: Tensor, begin: int, pad: int | None) -> Tensor:
    """Returns positions (B, S), from ``begin`` in each document; a model that begins after its
    padding token's number does not count padding."""
    if begin and ring.cu_seqlens is None:
        counted = input_ids.ne(-1 if pad is None else pad).long()
        return counted.cumsum(1) * counted + begin - 1
    return positions_in_documents(ring, input_ids.device).expand_as(input_ids) + begin


def positions_in_documents(ring: Ring, device: torch.device) -> Tensor:
    """Returns positions, int64 (S,), from 0 in each document, or (B, S) where batch rows hold
    documents of their own."""
    positions = torch.arange(ring.seq_len, dtype=torch.int64, device=device)
    if ring.cu_seqlens is None:
        return positions
    return within_documents(positions, boundaries(ring.cu_seqlens).to(device))


def _holds_pooled(forward: Forward, ring: Ring, input_ids: Tensor, pad: int | None) -> Tensor:
    """Returns (B,): whether this rank holds the token that the model pools."""
    rank, ranks = place_in(ring.group)
    here = local_positions(ring.partition, ring.seq_len, ranks, rank).to(input_ids.device)
    pooled = input_ids.new_zeros(len(input_ids))
    if forward.pool == "last":
        counted = input_ids.ne(-1 if pad is None else pad)
        pooled = counted.sum(1) - 1
        if (counted.long().diff(dim=1) > 0).any():
            raise ValueError(
                f"input_ids: token {pad} (pad_token_id) stands before another one, expected "
                "padding on the right: the model pools the last token before it"
            )
    return (here == pooled[:, None]).any(1)
