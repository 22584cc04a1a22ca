"""A tiny decoder with sequence parallelism of its own, right, and with one known bug each.

A target of ``ringray.verify``. K/V of all ranks are gathered, shards are zigzag, and each loss and
gradient is reduced by hand. ``build()`` plants the bug whose name is in the file that the
environment variable PLANTED names, so that the same processes serve one bug after another;
``planted.py:build_NAME`` plants it for good. ``BUGS`` tells which public report has each.

Shape legend: B rows of a batch, R rows of one rank, N ranks, H heads, D head dim, V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ringray.verification.compare import Origin

VARIABLE = "PLANTED"
BATCH, SEQ_LEN = 2, 32
_VOCABULARY, _WIDTH, _HEADS, _LAYERS, _EXPERTS = 61, 32, 2, 2, 4
_IGNORED = -100
_REPLICATED = 5  # tokens that every rank holds, where the bug is planted


class Bug(NamedTuple):
    """What a bug is, and how it has to be found.

    ``report``: public, whose symptom the bug has, or in words; ``probe``, ``mistake``, ``rank``,
    ``layer``, ``token``: of the finding; ``feature``: what the model has beside attention.
    """

    report: str
    what: str
    probe: str
    mistake: str
    rank: int | None = None
    layer: str | None = None
    token: int | None = None
    feature: str = ""


_FIRST, _SECOND = "layers.0.attention.out", "layers.1.attention.out"
_INPUTS = "layers.1.attention.qkv.bias"
BUGS = {
    "bypassed": Bug(
        "axolotl#3928, accelerate#3867", "attention runs on each shard by itself",
        "logits", "own-shard", 1, _FIRST, 8),
    "positions_contiguous": Bug(
        "sglang#22223", "rotary positions of contiguous shards, though shards are interleaved",
        "logits", "positions-contiguous", 1, _FIRST, 8),
    "positions_restart": Bug(
        "sglang#28463", "rotary positions begin at 0 on every rank",
        "logits", "positions-restart", 1, _FIRST, 8),
    "future": Bug(
        "zigzag with the mask of contiguous shards", "keys of lower ranks are all seen",
        "logits", "future", 1, _FIRST, 8),
    "hop": Bug(
        "a hop left out", "half of each other rank's keys are not seen",
        "logits", "lost-keys", 0, _FIRST, 24),
    "twice": Bug(
        "sglang#33327", "replicated tokens are counted once for each rank",
        "logits", "keys-twice", 0, _FIRST, 5),
    "scale": Bug(
        "the scale of split heads", "the softmax has another scale",
        "logits", "attention", 0, _FIRST, 1),
    "order": Bug(
        "rows back in the order of the text", "logits stand in another order than labels",
        "logits", "order", 0, None, 0),
    "leak": Bug(
        "trl#6843", "ranks do not get the boundaries of documents",
        "documents", "documents", 0, _FIRST, 7),
    "truncated": Bug(
        "lengths that do not divide", "what is left over is cut off",
        "padding", "rows-lost", None, None, 28),
    "nan_rows": Bug(
        "TransformerEngine#2186", "rows that see no key are NaN",
        "padding", "not-finite", 0, _SECOND, 0),
    "padding_seen": Bug(
        "NeMo Speech#15339", "padded keys are seen",
        "padding", "padding-seen", 0, _FIRST, 0),
    "packed_scale": Bug(
        "axolotl#3608", "the loss of packed documents is summed over ranks",
        "loss", "multiplied"),
    "padding_counted": Bug(
        "NeMo Speech#15339", "the mean counts tokens without a label",
        "loss", "padding-counted"),
    "documents_padded": Bug(
        "swiss-ai Megatron#104, NeMo-RL#3380",
        "each document is padded to 2 N, and the mean counts that",
        "loss", "padding-counted"),
    "shift": Bug(
        "verl#4250", "labels are shifted within shards",
        "loss", "labels-in-shards", 0, None, 7),
    "roll": Bug(
        "Megatron-LM#3714", "labels are rolled within shards",
        "loss", "labels-rolled", 0, None, 7),
    "shift_documents": Bug(
        "verl#4250", "the last token of a document predicts the next one",
        "loss", "labels-documents"),
    "means": Bug(
        "torchtitan#2983, #3257", "the loss is the mean of the ranks' means",
        "loss", "mean-of-means"),
    "masked_rank": Bug(
        "NeMo Speech#14488", "NaN if all tokens of a rank are masked",
        "uneven", "not-finite", 1),
    "ahead_roll": Bug(
        "Megatron-LM#6205, #4495", "labels two ahead are rolled within shards",
        "loss", "labels-ahead", 0, None, 7, feature="ahead"),
    "ahead_divided": Bug(
        "Megatron-LM#3943", "the loss two ahead is divided by N once more",
        "loss", "rest-divided", feature="ahead"),
    "router_means": Bug(
        "router losses", "each rank has the router loss of its own tokens",
        "router", "router-loss", feature="router"),
    "stale": Bug(
        "diffusers#14265, Automodel#3157", "backward uses K/V of another hop",
        "gradients", "backward", 0, _INPUTS),
    "detached": Bug(
        "Megatron-LM#1464", "gradients of K/V do not travel back",
        "gradients", "backward", 0, _INPUTS),
    "unreduced": Bug(
        "DeepSpeed#7473", "gradients are not summed over the ring",
        "gradients", "not-reduced", 0, "head.bias"),
    "averaged_twice": Bug(
        "Megatron-LM#1464", "gradients are averaged twice",
        "gradients", "divided", 0, "head.bias"),
    "summed": Bug(
        "DeepSpeed#7473", "gradients are summed, and the loss was averaged",
        "gradients", "multiplied", 0, "head.bias"),
    "norm": Bug(
        "clipping on one rank", "the norm is that of the rank's own part",
        "norm", "norm", 0),
    "dropout": Bug(
        "one seed for all ranks", "all ranks drop the same elements",
        "dropout", "dropout-equal", 1, "layers.0.dropout"),
    "resume": Bug(
        "a checkpoint without moments", "the optimizer's state is not loaded",
        "resume", "resume"),
    "generation": Bug(
        "vllm#41623", "new tokens have positions of the rank's own rows",
        "generation", "generation", 0, None, 33),
}  # fmt: skip

_bug = ""


def planted() -> str:
    """Returns the name of the bug that build() plants, which may be none."""
    place = os.environ.get(VARIABLE)
    return Path(place).read_text() if place else ""


def build(bug: str | None = None) -> nn.Module:
    global _bug
    _bug = planted() if bug is None else bug
    # The name of a feature is that of no bug.
    return Model(BUGS[_bug].feature if _bug in BUGS else _bug)


def reference() -> nn.Module:
    """Returns the model without the bug, in the process that runs alone."""
    model = build(_bug or None)
    globals()["_bug"] = ""
    return model


# planted.py:build_NAME is a target.
_TARGETS: dict[str, Callable[[], nn.Module]] = {name: partial(build, name) for name in BUGS}
globals().update({f"build_{name}": function for name, function in _TARGETS.items()})
build_right = partial(build, "")


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
    if _bug == "documents_padded" and cu_seqlens is not None:
        ends = cu_seqlens.tolist()
    if _bug == "truncated":
        ends[-1] -= length % (2 * ranks)
    for begin, end in pairwise(ends):
        block = -(-(end - begin) // (2 * ranks))
        for number in (rank, 2 * ranks - 1 - rank):
            first = begin + number * block
            row = torch.arange(first, first + block, dtype=torch.int64, device="cpu")
            parts.append(torch.where(row < end, row, -1))
    return torch.cat(parts)


def shard(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Deals a batch; tokens of padding are 0, and have no labels."""
    length = batch["input_ids"].shape[1]
    mine = places(length, batch.get("cu_seqlens"))
    dealt = {"places": mine} | {name: x for name, x in batch.items() if x.dim() == 1}
    ahead = functional.pad(batch["shift_labels"][:, 1:], (0, 1), value=_IGNORED)
    for name, x in (batch | {"ahead": ahead}).items():
        if x.dim() == 2:
            empty = _IGNORED if "label" in name or name == "ahead" else 0
            dealt[name] = torch.where(mine >= 0, x[:, mine], empty)
    _break_labels(dealt)
    size = len(mine)
    if _bug == "positions_contiguous":
        dealt["position_ids"][:] = dist.get_rank() * size + torch.arange(size, device="cpu")
    elif _bug == "positions_restart":
        dealt["position_ids"][:] = torch.arange(size, dtype=torch.int64, device="cpu")
    return dealt


def _break_labels(dealt: dict[str, Tensor]) -> None:
    last = _IGNORED
    if _bug in {"shift", "roll"}:
        dealt["shift_labels"] = dealt["labels"].roll(-1, 1)
        if _bug == "shift":
            dealt["shift_labels"][:, -1] = last
    elif _bug == "ahead_roll":
        dealt["ahead"] = dealt["shift_labels"].roll(-1, 1)
    elif _bug == "shift_documents" and "cu_seqlens" in dealt:
        ends = torch.isin(dealt["places"], dealt["cu_seqlens"][1:-1] - 1)
        dealt["shift_labels"][:, ends] = _next_of(dealt, ends)


def _next_of(dealt: dict[str, Tensor], ends: Tensor) -> Tensor:
    """Returns the tokens after some, which other ranks may hold."""
    every, labels = gathered(dealt["places"], 0), gathered(dealt["input_ids"], 1)
    following = [int((every == place + 1).nonzero()[0]) for place in dealt["places"][ends]]
    return labels[:, following]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor, part: dict[str, Tensor]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, _HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = (_rotated(y, part["position_ids"]) for y in (q, k))
        if _bug == "bypassed":
            mixed = _attend(q, k, v, _scores_mask(part, part["places"], None))
        else:
            every = gathered(part["places"], 0)
            owners = torch.arange(dist.get_world_size(), device="cpu").repeat_interleave(x.shape[1])
            seen = _scores_mask(part, every, owners)
            mixed = _attend(q, *_keys(k, v), seen, _weights(every))
            if _bug == "stale":
                # The numbers of this rank's forward, the gradients of another hop's K/V.
                stale = _attend(q, *(y.roll(x.shape[1], 2) for y in _keys(k, v)), seen)
                mixed = stale + (mixed - stale).detach()
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _keys(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if _bug != "detached":
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
    if _bug == "future" and owners is not None:
        order = torch.arange(len(mine), device="cpu").repeat(dist.get_world_size())
        own = (owners == rank) & (torch.arange(len(mine), device="cpu")[:, None] >= order)
        seen = (owners < rank) | own
    if _bug == "hop" and owners is not None:
        second = torch.arange(len(every), device="cpu") % len(mine) >= len(mine) // 2
        seen &= (owners == rank) | ~second
    if "cu_seqlens" in part and _bug != "leak":
        mine, of_key = (torch.searchsorted(part["cu_seqlens"].long(), x, right=True)
                        for x in (mine, every))  # fmt: skip
        seen &= mine[:, None] == of_key
    return seen if _bug == "padding_seen" else seen & (every >= 0)


def _weights(every: Tensor) -> Tensor | None:
    """Returns how often each key is counted."""
    if _bug != "twice":
        return None
    replicated = (every >= 0) & (every < _REPLICATED)
    return torch.where(replicated, dist.get_world_size(), 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, times: Tensor | None = None) -> Tensor:
    scale = q.shape[-1] ** -0.5 * (0.7 if _bug == "scale" else 1)
    scores = q @ k.mT * scale
    if times is not None:
        scores = scores + times.to(q.dtype).log()
    if _bug == "nan_rows":
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
    def __init__(self, routed: bool) -> None:
        super().__init__()
        self.attention = Attention()
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
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList([Layer(feature == "router") for _ in range(_LAYERS)])
        self.head = nn.Linear(_WIDTH, _VOCABULARY)
        if feature == "ahead":
            self.ahead = nn.Linear(_WIDTH, _VOCABULARY)
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
    if _bug == "router_means":
        return _EXPERTS * (load * (shares * valid).sum((0, 1))).sum() / count**2
    dist.all_reduce(load)
    dist.all_reduce(count)
    share = (shares * valid).sum((0, 1)) * dist.get_world_size()
    return _EXPERTS * (load * share).sum() / count**2


def context() -> AbstractContextManager[None]:
    return nullcontext()  # no ring of ours


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    part = batch if "places" in batch else shard(batch)
    if _bug == "dropout":
        torch.manual_seed(0)
    out = model(part)
    loss = _loss(out["logits"], part["shift_labels"], part)
    if out["ahead"] is not None:
        further = _loss(out["ahead"], part["ahead"], part)
        loss = loss + 0.3 * further / (dist.get_world_size() if _bug == "ahead_divided" else 1)
    if model.feature == "router":
        loss = loss + out["balance"]
    if _bug == "order":
        return {"logits": out["logits"].roll(out["logits"].shape[1] // 2, 1), "loss": loss}
    return {"logits": out["logits"], "loss": loss}


def _loss(logits: Tensor, labels: Tensor, part: dict[str, Tensor]) -> Tensor:
    """Returns a rank's part of the mean over the labels of all ranks; the parts average to it."""
    ranks, flat = dist.get_world_size(), labels.flatten()
    total = functional.cross_entropy(
        logits.flatten(0, 1), flat, ignore_index=_IGNORED, reduction="sum"
    )
    count = (flat != _IGNORED).sum()
    mine = count.clone()
    if _bug == "means":
        return total / count.clamp(min=1)
    packed = "cu_seqlens" in part
    if _bug == "padding_counted" or (_bug == "documents_padded" and packed):
        count.fill_(flat.numel())
    dist.all_reduce(count)
    if _bug == "masked_rank":
        return total / mine * (mine * ranks / count)
    scaled = total * ranks / count
    return scaled * ranks if _bug == "packed_scale" and packed else scaled


_own_norm: list[float] = []


def reduce(model: nn.Module) -> None:
    own = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    _own_norm[:] = [float(own)]
    if _bug == "unreduced":
        return
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            ranks = dist.get_world_size()
            weight.grad /= {"averaged_twice": ranks**2, "summed": 1}.get(_bug, ranks)


def grad_norm(model: nn.Module) -> float:
    if _bug == "norm":
        return _own_norm[0]
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    if _bug != "resume":
        optimizer.load_state_dict(state["optimizer"])


def generate(model: nn.Module, input_ids: Tensor, new: int) -> Tensor:
    """Computes all rows anew for each token; the rank that holds the last one tells it."""
    prompt = input_ids.shape[1]
    for _ in range(new):
        length = input_ids.shape[1]
        positions = torch.arange(length, dtype=torch.int64, device="cpu").expand_as(input_ids)
        if _bug == "generation":
            own = prompt // dist.get_world_size()
            positions = torch.where(positions < prompt, positions, positions - prompt + own)
        batch = dict.fromkeys(("input_ids", "labels", "shift_labels"), input_ids)
        batch["position_ids"] = positions
        part = shard(batch)
        logits = model(part)["logits"]
        every, tokens = gathered(part["places"], 0), gathered(logits.argmax(-1), 1)
        last = int((every == length - 1).nonzero()[0])
        input_ids = torch.cat([input_ids, tokens[:, last : last + 1]], 1)
    return input_ids


def table() -> str:
    """Returns a Markdown table of the bugs and of how they are found."""
    lines = ["| bug | report | probe | mistake | begins at |", "|---|---|---|---|---|"]
    for bug in BUGS.values():
        place = Origin(bug.rank, bug.layer, bug.token)
        where = "–" if place == (None, None, None) else str(place)
        lines.append(f"| {bug.what} | {bug.report} | {bug.probe} | {bug.mistake} | {where} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
