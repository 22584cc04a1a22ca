"""A tiny decoder with sequence parallelism of its own, right, and with one known bug each.

A target of ``ringray.verify``. K/V of all ranks are gathered, shards are zigzag, and each loss and
gradient is reduced by hand. ``build()`` plants the bug whose name is in the file that the
environment variable PLANTED names, so that the same processes serve one bug after another;
``planted.py:build_NAME`` plants it for good. ``BUGS`` tells which public report has each. Bugs of
attention and of layers are made in ``planted_model.py``, all others here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ringray.verification.verdict import MISTAKES, Finding
from tests.support.planted_model import Model, Planting, gathered, places

VARIABLE = "PLANTED"
BATCH, SEQ_LEN = 2, 32
_IGNORED = -100


class Bug(NamedTuple):
    """A bug, and how it has to be found.

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
    "hop_twice": Bug(
        "a hop merged twice", "each other rank's keys are counted twice",
        "logits", "keys-twice", 1, _FIRST, 8),
    "far": Bug(
        "a ring that ends a hop early", "the farthest keys are not seen; layers above hide it",
        "logits", "lost-keys", 1, _FIRST, 16),
    "batch": Bug(
        "an index of the batch left out", "other ranks' keys are those of the batch's first row",
        "logits", "batch", 1, _FIRST, 8),
    "heads": Bug(
        "heads in another order", "other ranks' keys and values are those of another head",
        "logits", "attention", 1, _FIRST, 8),
    "second_layer": Bug(
        "a layer that is not routed", "the second layer runs on each shard by itself",
        "logits", "attention", 1, _SECOND, 8),
    "rounded": Bug(
        "communication in bfloat16", "other ranks' keys and values are rounded",
        "logits", "precision", 1, _FIRST, 8),
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
        "uneven", "no-labels", 1),
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


def planted() -> str:
    """Returns the name of the bug that build() plants, which may be none."""
    place = os.environ.get(VARIABLE)
    return Path(place).read_text() if place else ""


def build(bug: str | None = None) -> nn.Module:
    Planting.bug = planted() if bug is None else bug
    # The name of a feature is that of no bug.
    return Model(BUGS[Planting.bug].feature if Planting.bug in BUGS else Planting.bug)


def reference() -> nn.Module:
    """Returns the model without the bug, in the process that runs alone."""
    model = build(Planting.bug or None)
    Planting.bug = ""
    return model


# planted.py:build_NAME is a target.
_TARGETS: dict[str, Callable[[], nn.Module]] = {name: partial(build, name) for name in BUGS}
globals().update({f"build_{name}": function for name, function in _TARGETS.items()})
build_right = partial(build, "")


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
    if Planting.bug == "positions_contiguous":
        dealt["position_ids"][:] = dist.get_rank() * size + torch.arange(size, device="cpu")
    elif Planting.bug == "positions_restart":
        dealt["position_ids"][:] = torch.arange(size, dtype=torch.int64, device="cpu")
    return dealt


def _break_labels(dealt: dict[str, Tensor]) -> None:
    last = _IGNORED
    if Planting.bug in {"shift", "roll"}:
        dealt["shift_labels"] = dealt["labels"].roll(-1, 1)
        if Planting.bug == "shift":
            dealt["shift_labels"][:, -1] = last
    elif Planting.bug == "ahead_roll":
        dealt["ahead"] = dealt["shift_labels"].roll(-1, 1)
    elif Planting.bug == "shift_documents" and "cu_seqlens" in dealt:
        ends = torch.isin(dealt["places"], dealt["cu_seqlens"][1:-1] - 1)
        dealt["shift_labels"][:, ends] = _next_of(dealt, ends)


def _next_of(dealt: dict[str, Tensor], ends: Tensor) -> Tensor:
    """Returns the tokens after some, which other ranks may hold."""
    every, labels = gathered(dealt["places"], 0), gathered(dealt["input_ids"], 1)
    following = [int((every == place + 1).nonzero()[0]) for place in dealt["places"][ends]]
    return labels[:, following]


def context() -> AbstractContextManager[None]:
    return nullcontext()  # no ring of ours


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    part = batch if "places" in batch else shard(batch)
    if Planting.bug == "dropout":
        torch.manual_seed(0)
    out = model(part)
    loss = _loss(out["logits"], part["shift_labels"], part)
    if out["ahead"] is not None:
        further = _loss(out["ahead"], part["ahead"], part)
        ranks = dist.get_world_size()
        loss = loss + 0.3 * further / (ranks if Planting.bug == "ahead_divided" else 1)
    if model.feature == "router":
        loss = loss + out["balance"]
    if Planting.bug == "order":
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
    if Planting.bug == "means":
        return total / count.clamp(min=1)
    packed = "cu_seqlens" in part
    if Planting.bug == "padding_counted" or (Planting.bug == "documents_padded" and packed):
        count.fill_(flat.numel())
    dist.all_reduce(count)
    if Planting.bug == "masked_rank":
        return total / mine * (mine * ranks / count)
    scaled = total * ranks / count
    return scaled * ranks if Planting.bug == "packed_scale" and packed else scaled


_own_norm: list[float] = []


def reduce(model: nn.Module) -> None:
    own = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    _own_norm[:] = [float(own)]
    if Planting.bug == "unreduced":
        return
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
            ranks = dist.get_world_size()
            weight.grad /= {"averaged_twice": ranks**2, "summed": 1}.get(Planting.bug, ranks)


def grad_norm(model: nn.Module) -> float:
    if Planting.bug == "norm":
        return _own_norm[0]
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf))


def load(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    if Planting.bug != "resume":
        optimizer.load_state_dict(state["optimizer"])


def generate(model: nn.Module, input_ids: Tensor, new: int) -> Tensor:
    """Computes all rows anew for each token; the rank that holds the last one tells it."""
    prompt = input_ids.shape[1]
    for _ in range(new):
        length = input_ids.shape[1]
        positions = torch.arange(length, dtype=torch.int64, device="cpu").expand_as(input_ids)
        if Planting.bug == "generation":
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
        where = Finding("", "", "", bug.rank, bug.layer, bug.token).place or "–"
        lines.append(f"| {bug.what} | {bug.report} | {bug.probe} | {bug.mistake} | {where} |")
    return "\n".join(lines)


def mistakes() -> str:
    """Returns a Markdown table of the kinds of mistakes."""
    lines = ["| mistake | means |", "|---|---|"]
    lines += [f"| `{name}` | {mistake.meaning} |" for name, mistake in MISTAKES.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(mistakes(), table(), sep="\n\n")
