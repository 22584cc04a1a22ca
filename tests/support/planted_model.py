"""The tiny decoder of ``planted.py``: where its rows are, its attention and its layers, with the
bugs that are made there.

Shape legend: B rows of a batch, R rows of one rank, N ranks, H heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, _WIDTH, _HEADS, _LAYERS, _EXPERTS = 61, 32, 2, 2, 4
_REPLICATED = 5  # tokens that every rank holds, where the bug is planted
_BLOCK = 8  # tokens that zigzag deals at once


class Planting:
    """The bug of this process."""

    bug = ""


class Gathered(torch.autograd.Function):
    """Tensors of all ranks, (N, ...); each gets the sum of the gradients that ranks have of its."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous()
        dist.all_reduce(total)
        return total[dist.get_rank()]


def gathered(x: Tensor, dim: int) -> Tensor:
    """Returns the rows of all ranks along ``dim``."""
    every: Tensor = Gathered.apply(x)  # type: ignore[no-untyped-call]
    return torch.cat([*every], dim)


def places(length: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Returns the places of this rank's rows, (R,) int64, zigzag; -1 is padding."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return torch.arange(length, dtype=torch.int64, device="cpu")
    parts, ends = [], [0, length]
    if Planting.bug == "documents_padded" and cu_seqlens is not None:
        ends = cu_seqlens.tolist()
    if Planting.bug == "truncated":
        ends[-1] -= length % (2 * ranks)
    for begin, end in pairwise(ends):
        block = -(-(end - begin) // (2 * ranks))
        for number in (rank, 2 * ranks - 1 - rank):
            first = begin + number * block
            row = torch.arange(first, first + block, dtype=torch.int64, device="cpu")
            parts.append(torch.where(row < end, row, -1))
    return torch.cat(parts)


class Attention(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor, part: dict[str, Tensor]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = (_rotated(y, part["position_ids"]) for y in (q, k))
        if Planting.bug == "bypassed" or (Planting.bug == "second_layer" and self.number == 1):
            mixed = _attend(q, k, v, _scores_mask(part, part["places"], None))
        else:
            every = gathered(part["places"], 0)
            owners = torch.arange(dist.get_world_size(), device="cpu").repeat_interleave(x.shape[1])
            seen = _scores_mask(part, every, owners)
            mixed = _attend(q, *_keys(k, v), seen, _weights(every, owners))
            if Planting.bug == "stale":
                # The numbers of this rank's forward, the gradients of another hop's K/V.
                stale = _attend(q, *(y.roll(x.shape[1], 2) for y in _keys(k, v)), seen)
                mixed = stale + (mixed - stale).detach()
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


# What becomes of keys and values (B, H, R, D) of other ranks.
_OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads": lambda x: x.flip(1),
    "batch": lambda x: x[:1].expand_as(x),
    "rounded": lambda x: x.bfloat16().to(x.dtype),
}


def _keys(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if Planting.bug in _OTHERS:
        broken, rank = _OTHERS[Planting.bug], dist.get_rank()
        parts = (gathered(y, 2).chunk(dist.get_world_size(), 2) for y in (k, v))
        k, v = (
            torch.cat([y if i == rank else broken(y) for i, y in enumerate(x)], 2) for x in parts
        )
        return k, v
    if Planting.bug != "detached":
        return gathered(k, 2), gathered(v, 2)
    every = [[torch.empty_like(y) for _ in range(dist.get_world_size())] for y in (k, v)]
    for parts, mine in zip(every, (k, v), strict=True):
        dist.all_gather(parts, mine.detach().contiguous())
        parts[dist.get_rank()] = mine
    return torch.cat(every[0], 2), torch.cat(every[1], 2)


def _scores_mask(part: dict[str, Tensor], every: Tensor, owners: Tensor | None) -> Tensor:
    """Returns which keys each row sees, (R, all rows)."""
    mine, rank = part["places"], dist.get_rank()
    seen = mine[:, None] >= every
    if Planting.bug == "future" and owners is not None:
        order = torch.arange(len(mine), device="cpu").repeat(dist.get_world_size())
        own = (owners == rank) & (torch.arange(len(mine), device="cpu")[:, None] >= order)
        seen = (owners < rank) | own
    if Planting.bug == "hop" and owners is not None:
        second = torch.arange(len(every), device="cpu") % len(mine) >= len(mine) // 2
        seen &= (owners == rank) | ~second
    if Planting.bug == "far" and rank == 1:
        seen &= (mine[:, None] < 2 * _BLOCK) | (every >= _BLOCK)
    if "cu_seqlens" in part and Planting.bug != "leak":
        mine, of_key = (
            torch.searchsorted(part["cu_seqlens"].long(), x, right=True) for x in (mine, every)
        )
        seen &= mine[:, None] == of_key
    return seen if Planting.bug == "padding_seen" else seen & (every >= 0)


def _weights(every: Tensor, owners: Tensor) -> Tensor | None:
    """Returns how often each key is counted."""
    if Planting.bug == "hop_twice":
        return torch.where(owners == dist.get_rank(), 1, 2)
    if Planting.bug != "twice":
        return None
    replicated = (every >= 0) & (every < _REPLICATED)
    return torch.where(replicated, dist.get_world_size(), 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, times: Tensor | None = None) -> Tensor:
    scale = q.shape[-1] ** -0.5 * (0.7 if Planting.bug == "scale" else 1)
    scores = q @ k.mT * scale
    if times is not None:
        scores = scores + times.to(q.dtype).log()
    if Planting.bug == "nan_rows":
        return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
    weights = scores.masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1)
    return weights * seen.any(-1, keepdim=True) @ v


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotates pairs of numbers of (B, H, R, D) by their positions (B, R)."""
    half = x.shape[-1] // 2
    rates = 100.0 ** -(torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = (positions[..., None] * rates)[:, None]
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Layer(nn.Module):
    def __init__(self, number: int, routed: bool) -> None:
        super().__init__()
        self.attention = Attention(number)
        self.norms = nn.ModuleList([nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)])
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.router = nn.Linear(_WIDTH, _EXPERTS) if routed else None
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, part: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        x = x + self.dropout(self.attention(self.norms[0](x), part))
        y = self.norms[1](x)
        hidden, shares = functional.gelu(self.up(y)), None
        if self.router is not None:
            shares = self.router(y).softmax(-1)
            hidden = (hidden.unflatten(-1, (_EXPERTS, -1)) * shares[..., None]).flatten(-2)
        return x + self.dropout(self.down(hidden)), shares


class Model(nn.Module):
    """A decoder; ``feature``: ``ahead`` predicts the token after the next one too, ``router`` has
    experts and a loss that balances them."""

    def __init__(self, feature: str) -> None:
        super().__init__()
        self.feature = feature
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(Layer(x, feature == "router") for x in range(_LAYERS))
        self.head = nn.Linear(_WIDTH, VOCABULARY)
        if feature == "ahead":
            self.ahead = nn.Linear(_WIDTH, VOCABULARY)
        with torch.no_grad():
            for weight in self.parameters():
                weight *= 2.0  # attention has to matter

    def forward(self, part: dict[str, Tensor]) -> dict[str, Any]:
        x, balance = self.embed(part["input_ids"]), []
        for layer in self.layers:
            x, shares = layer(x, part)
            if shares is not None:
                balance.append(_balance(shares, part["places"]))
        ahead = self.ahead(x) if self.feature == "ahead" else None
        return {"logits": self.head(x), "ahead": ahead, "balance": sum(balance)}


def _balance(shares: Tensor, mine: Tensor) -> Tensor:
    """Returns a rank's part of E * sum(load * mean share), shares (B, R, E): the load is that of
    all ranks."""
    valid = (mine >= 0)[:, None].to(shares.dtype)
    load = (functional.one_hot(shares.argmax(-1), _EXPERTS) * valid).sum((0, 1))
    count = valid.sum() * len(shares)
    if Planting.bug == "router_means":
        return _EXPERTS * (load * (shares * valid).sum((0, 1))).sum() / count**2
    dist.all_reduce(load)
    dist.all_reduce(count)
    share = (shares * valid).sum((0, 1)) * dist.get_world_size()
    return _EXPERTS * (load * share).sum() / count**2
