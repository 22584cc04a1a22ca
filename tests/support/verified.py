"""Models that tests verify, each a function that builds it: ``tests.support.verified:NAME``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ringray
from ringray.models.decoder import Decoder
from ringray.models.sizes import named

VOCABULARY, HIDDEN, HEADS, LONGEST = 64, 32, 4, 512


class Plain(nn.Module):
    """Attention of plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        rows: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return rows


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(HIDDEN), attention
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor, **where: Any) -> Tensor:
        x = x + self.attention(self.norm(x), **where)
        out: Tensor = x + self.mlp(x)
        return out


class Small(nn.Module):
    """A model with learned positions."""

    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(LONGEST, HIDDEN)
        self.layers = nn.ModuleList(Layer(attention()) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Routed(Small):
    """A model with our attention."""

    def forward(self, tokens: Tensor, positions: Tensor, **where: Any) -> Tensor:  # type: ignore[override]
        x = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, **where)
        logits: Tensor = self.head(x)
        return logits


class Lost(Small):
    """A model that takes its positions from its own rows: wrong on any shard but the first."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        rows = torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device)
        return super().forward(tokens, rows.expand_as(tokens))


class Misplaced(Small):
    """A model whose positions are off by one on all ranks but the first."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return super().forward(tokens, positions + min(dist.get_rank(), 1))


class Batched(Small):
    """A model whose rows know each other: wrong where a rank has some rows only."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens, positions)
        return logits - logits.mean(0)


def sdpa() -> nn.Module:
    return Small(Plain)


def lost() -> nn.Module:
    return Lost(Plain)


def misplaced() -> nn.Module:
    return Misplaced(Plain)


def batched() -> nn.Module:
    return Batched(Plain)


def module() -> nn.Module:
    return Routed(_ours)


def lost_module() -> nn.Module:
    return Lost(_ours)


def decoder() -> nn.Module:
    return Decoder(named("llama-tiny", {}))


def ringray_llama() -> nn.Module:
    """Makes a model that its user has put on our ring already."""
    from ringray.models import huggingface

    return _family("llama", huggingface.NAME)


def __getattr__(kind: str) -> Callable[[], nn.Module]:
    """Returns the function that builds a model of a family of transformers."""
    if kind.startswith("_"):
        raise AttributeError(kind)
    return partial(_family, kind, "sdpa" if kind in ("llama", "qwen2") else "eager")


def _ours() -> nn.Module:
    return ringray.ContextParallelAttention(HIDDEN, HEADS, num_kv_heads=2)


def _family(kind: str, attention: str) -> nn.Module:
    from tests.support.huggingface_zoo import build, classes

    return build(kind, classes("causal")[kind], attention)
