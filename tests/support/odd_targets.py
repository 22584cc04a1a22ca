"""Targets of ``ringray verify`` that misbehave, each a function that builds one."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, HEADS, HEAD_DIM = 32, 2, 8
RANK = int(os.environ.get("RANK", 0))


class TinyTarget(nn.Module):
    """One layer of causal attention; ``before`` is called in each forward, with its arguments."""

    def __init__(self, before: Callable[..., Any] | None = None) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, VOCABULARY)
        self.before = before

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor | None = None) -> Any:
        if self.before is not None:
            self.before(input_ids, cu_seqlens)
        x = self.embedding(input_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + mixed.transpose(1, 2).flatten(2))


def good() -> nn.Module:
    return TinyTarget()


def of_rank_1(act: Callable[[], Any]) -> Callable[..., None]:
    """Returns a function that acts on rank 1."""

    def before(ids: Tensor, cu_seqlens: Tensor | None) -> None:
        if RANK == 1:
            act()

    return before


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def refuse() -> None:
    raise ValueError("no odd ranks")


def raises_in_build() -> nn.Module:
    if RANK == 1:
        refuse()
    return TinyTarget()


def seeded_by_rank() -> nn.Module:
    torch.manual_seed(RANK)
    return TinyTarget()


def hangs() -> nn.Module:
    return TinyTarget(of_rank_1(sleep_for_ever))


def hangs_in_build() -> nn.Module:
    """Hangs, and writes its process to the folder that ODD_TARGETS names."""
    (Path(os.environ["ODD_TARGETS"]) / f"{os.getpid()}").touch()
    sleep_for_ever()
    return TinyTarget()


def hangs_in_shard() -> Any:
    def shard(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        sleep_for_ever()
        return batch

    return TinyTarget(), shard


def hangs_in_backward() -> nn.Module:
    model = TinyTarget()
    if RANK == 1:
        model.head.weight.register_hook(lambda gradient: sleep_for_ever())
    return model


def exits() -> nn.Module:
    return TinyTarget(of_rank_1(lambda: os._exit(3)))


def leaves() -> nn.Module:
    return TinyTarget(of_rank_1(sys.exit))


def crashes() -> nn.Module:
    return TinyTarget(of_rank_1(lambda: ctypes.string_at(0)))


def needs_equal_shards() -> Any:
    """Deals what is left over to the first rank; a collective of its model fails then."""

    def gather(ids: Tensor, cu_seqlens: Tensor | None) -> None:
        ids = ids.contiguous()
        dist.all_gather([torch.empty_like(ids) for _ in range(dist.get_world_size())], ids)

    def shard(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.chunk(dist.get_world_size(), 1)[RANK] for name, x in batch.items()}

    return TinyTarget(gather), shard


def is_no_module() -> Any:
    return [TinyTarget()]


def fails_on_documents() -> nn.Module:
    """Fails on rank 1 only, with packed documents only."""

    def before(ids: Tensor, cu_seqlens: Tensor | None) -> None:
        if RANK == 1 and cu_seqlens is not None:
            refuse()

    return TinyTarget(before)


def refuses_documents() -> nn.Module:
    def before(ids: Tensor, cu_seqlens: Tensor | None) -> None:
        if cu_seqlens is not None:
            raise ValueError("takes no documents")

    return TinyTarget(before)


def scaled_on_rank_1() -> nn.Module:
    """Computes one layer wrongly on one rank."""
    model = TinyTarget()
    if RANK == 1:
        model.qkv.register_forward_hook(lambda module, args, out: 1.5 * out)
    return model
