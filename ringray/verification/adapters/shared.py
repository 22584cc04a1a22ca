"""Parts that several adapters need: this rank's part of a batch, and other attention in a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def rows_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors (B, S) of a batch, but ``labels``: models of transformers shift those
    themselves, within a shard, and average over the labels of their own rank."""
    return {name: x for name, x in batch.items() if x.dim() > 1 and name != "labels"}


def chunked(batch: dict[str, Tensor], dim: int) -> dict[str, Tensor]:
    """Returns this rank's block of each tensor (B, S) of a batch; ``dim``: 0 deals rows, 1 tokens.

    Raises:
        ValueError: there are not as many for each rank.
    """
    size, ranks = batch["input_ids"].shape[dim], dist.get_world_size()
    if size % ranks:
        what = ("rows", "tokens")[dim]
        raise ValueError(f"a batch of {size} {what}: expected a multiple of {ranks} ranks")
    return {name: x.chunk(ranks, dim)[dist.get_rank()] for name, x in rows_of(batch).items()}


def documents_of(batch: dict[str, Tensor]) -> Tensor:
    """Returns the number of the document of each position, int64 (S,)."""
    ids = batch["input_ids"]
    ends = batch.get("cu_seqlens", torch.tensor([0], dtype=torch.int32, device="cpu"))
    positions = torch.arange(ids.shape[1], dtype=torch.int64, device=ids.device)
    return torch.searchsorted(ends.to(ids.device).long(), positions, right=True)


@contextmanager
def attention_is(function: Callable[..., Any]) -> Iterator[None]:
    """Puts a function in the place of ``scaled_dot_product_attention`` of ``F``."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = function
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
