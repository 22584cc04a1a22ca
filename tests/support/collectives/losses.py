"""Losses, and figures of tokens, of rows that ranks share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ringray
import ringray.nn
from tests.support.collectives.collective import (
    HIDDEN,
    ROWS,
    VOCABULARY,
    Calls,
    Collective,
    compiled,
    faked,
    in_vmap,
    while_broken,
)


def loss_of(run: Callable[..., Any], values: Tensor, name: str) -> Collective:
    labels = torch.ones(1, ROWS, dtype=torch.int64)
    far = labels.clone()
    far[0, 2] = VOCABULARY
    wrong: Calls = {
        "labels: got 10, expected 0 to 9": partial(run, values, far),
        r"labels: got torch.int64 of shape \(1, 3\)": partial(run, values, labels[:, 1:]),
        "labels: got torch.float32": partial(run, values, labels.float()),
        f"{name}: got torch.int64": partial(run, values.long(), labels),
        "ignore_index: got -100, .* torch.uint8": partial(run, values, labels.byte()),
        "gradients: got 'most'": partial(run, values, labels, gradients="most"),
        "vmap": partial(in_vmap, partial(run, labels=labels), values),
        "a FakeTensor|FakeTensors": partial(faked, partial(run, labels=labels), values),
        "cannot send tensors of meta": partial(run, values.to("meta"), labels.to("meta")),
        "rank is broken": partial(while_broken, F, "cross_entropy", partial(run, values, labels)),
        "labels: got 10, expected 0": partial(compiled, run, values, far),
    }
    other: Calls = {
        "ignore_index: ": partial(run, values, labels, ignore_index=3),
        "gradients: ": partial(run, values, labels, gradients="mean"),
        "dtype: ": partial(run, values.double(), labels),
        "disagree about what they do": partial(ringray.unshard, values, dim=1),
    }
    return Collective(partial(run, values, labels), wrong, other)


def plain_loss() -> Collective:
    rows = torch.randn(1, ROWS, VOCABULARY)
    collective = loss_of(ringray.sharded_cross_entropy, rows, "logits")
    labels = torch.ones(1, ROWS, dtype=torch.int64)
    narrow = partial(ringray.sharded_cross_entropy, rows[..., :4], labels)
    return collective._replace(
        other={**collective.other, "features: 10 here|features: 4 here": narrow}
    )


def linear_loss() -> Collective:
    head = nn.Linear(HIDDEN, VOCABULARY)

    def run(x: Any, labels: Any, **others: Any) -> Tensor:
        own = head.to(x.dtype) if x.device.type == "cpu" and x.is_floating_point() else head
        if x.device.type == "meta":
            own = nn.Linear(HIDDEN, VOCABULARY, device="meta")
        return ringray.nn.sharded_linear_cross_entropy(x, own, labels, rows=3, **others)

    values = torch.randn(1, ROWS, HIDDEN)
    loss = loss_of(run, values, "x")
    labels = torch.ones(1, ROWS, dtype=torch.int64)
    wrong = {
        **loss.wrong,
        r"x: got torch.float32 of shape \(1, 16\)": partial(run, values[:, 0], labels[:, 0]),
        "rows: got 0": partial(
            ringray.nn.sharded_linear_cross_entropy, values, head.float(), labels, rows=0
        ),
    }
    plain = partial(ringray.sharded_cross_entropy, values, labels)
    return loss._replace(
        wrong=wrong, other={**loss.other, "sharded_linear_cross_entropy.*there": plain}
    )


OF_TOKENS = ("log_probs", "entropy", "top_k")


def of_tokens(name: str) -> Collective:
    """Calls a function of rows whose vocabulary is sharded over all ranks."""
    function, values = getattr(ringray.nn, name), torch.randn(1, ROWS, VOCABULARY)
    labels = torch.ones(1, ROWS, dtype=torch.int64)
    others = {"token_log_probs": (labels,), "token_top_k": (2,)}.get(name, ())
    world = dist.group.WORLD

    def run(x: Any, *arguments: Any, **options: Any) -> Any:
        return function(x, *(arguments or others), **{"vocab_group": world, **options})

    wrong: Calls = {
        "logits: got torch.int64": partial(run, values.long()),
        "logits: got int": partial(run, 3),
        "temperature: got 0": partial(run, values, temperature=0),
        "rows: got 0": partial(run, values, rows=0),
        r"x: got torch.float32 of shape \(1, 10\)": partial(
            run, values[:, 0], head=nn.Linear(10, 10)
        ),
        "vmap": partial(in_vmap, run, values),
        "a FakeTensor|FakeTensors": partial(faked, run, values),
        "cannot send tensors of meta": partial(run, values.to("meta")),
        "rank is broken": partial(
            while_broken, F, "linear", partial(run, values, head=nn.Linear(VOCABULARY, VOCABULARY))
        ),
        "temperature: got -1": partial(compiled, partial(run, temperature=-1), values),
    }
    if name == "token_log_probs":
        far = labels.clone()
        far[0, 2] = 3 * VOCABULARY
        wrong |= {
            "labels: got 30, expected 0 to 29": partial(run, values, far),
            r"labels: got torch.int64 of shape \(1, 3\)": partial(run, values, labels[:, 1:]),
            "ignore_index: got -100, .* torch.uint8": partial(run, values, labels.byte()),
            "labels: got 30, expected 0": partial(compiled, run, values, far),
        }
    if name == "token_top_k":
        wrong |= {
            "k: got 31, expected at most 30": partial(run, values, 31),
            "k: got 1.5": partial(run, values, 1.5),
        }
    other: Calls = {
        "temperature: ": partial(run, values, temperature=2),
        "dtype: ": partial(run, values.double()),
        "shape: ": partial(run, values[:, :2], *(x[:, :2] for x in others if x is labels)),
        "columns: ": partial(run, values[..., :4]),
        "disagree about what they do": partial(ringray.unshard, values, dim=1),
    }
    return Collective(partial(run, values), wrong, other)
