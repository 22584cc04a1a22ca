"""Checks of every rank of a real ring: dropout is that of one process."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ringray
from ringray import transport
from ringray.partition import PARTITIONS
from ringray.traffic import walk
from tests.support.compile_checks import compiled, same_bits
from tests.support.ranks import Case
from tests.support.ring_truth import MASKS, truth, within_budget

if TYPE_CHECKING:
    from torch import Tensor


def exact(rank: int, size: int) -> None:
    """Transports, partitions and walks back in turns: the weights that one process drops."""
    shape = {"heads": 4 * size, "kv_heads": 2 * size, "batch": 2, "seq_len": 61}
    ways = zip(
        [*transport.TRANSPORTS, "allgather:2"] * 2, itertools.cycle([*PARTITIONS, "striped"]),
        itertools.cycle(["auto", *walk.BACKWARDS]), strict=False,
    )  # fmt: skip
    truths = {"aten": truth(Case("zigzag", dropout_p=0.3, **shape))}
    truths["reference"] = truth(Case("zigzag", dropout_p=0.3, **shape, **MASKS[6]))
    for turn, (way, partition, backward) in enumerate(ways):
        backend, mask = (("aten", {}), ("reference", MASKS[6]))[turn % 2]
        case = Case(
            partition, dropout_p=0.3, transport=way, backward=backward, backend=backend, **shape,
            **mask,
        )  # fmt: skip
        with contextlib.suppress(walk.Unwalkable):
            within_budget(case, rank, size, truths[backend])


def with_the_rest(rank: int, size: int) -> None:
    """Beside sinks, a softcap, another head dim of v and gradients of lse."""
    for at, way in enumerate(("ring", "ulysses", "allgather")):
        case = Case(
            list(PARTITIONS)[at], transport=way, dropout_p=0.6, with_sinks=True, with_dlse=True,
            softcap=0.7, value_dim=24, heads=2 * size, kv_heads=size, prefix=9,
        )  # fmt: skip
        within_budget(case, rank, size, truth(case))


def seeds(rank: int, size: int) -> None:
    """Seeds come from torch's generator; where ranks draw others, or have them, all say so."""
    case = Case("zigzag", dropout_p=0.5, heads=4, kv_heads=2)
    q, k, v, _ = case.shards(0.0)
    drawn = case.arguments | {"dropout_seed": None}
    torch.manual_seed(3)
    first, second = (ringray.ring_attention(q, k, v, **drawn) for _ in range(2))
    assert not torch.equal(first, second)  # type: ignore[arg-type]
    torch.manual_seed(3)
    assert torch.equal(ringray.ring_attention(q, k, v, **drawn), first)  # type: ignore[arg-type]
    if size == 1:
        return
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match=r"problem: dropout_seed: .*; give the same .*manual_seed"):
        ringray.ring_attention(q, k, v, **drawn)
    given: dict[str, tuple[dict[str, Any], str]] = {
        "dropout_seed: ": ({}, "dropout_seed: 5"),
        "dropout_p: ": ({"dropout_p": 0.0}, "dropout_p: "),
        "refused": ({"dropout_p": 1.0}, "dropout_p: got 1.0, expected a number of at least 0"),
    }
    for others, (changes, own) in given.items():
        last = rank == size - 1
        more = case.arguments | ({"dropout_seed": 5} | changes if last else {})
        with pytest.raises(ValueError, match=own if last else others):
            ringray.ring_attention(q, k, v, **more)
    torch.manual_seed(3)
    assert torch.equal(ringray.ring_attention(q, k, v, **drawn), first)  # type: ignore[arg-type]


def under_torch_compile(rank: int, size: int) -> None:
    """The same bits, with every gradient, for seeds that are drawn."""
    case = Case("zigzag", dropout_p=0.3, heads=4 * size, kv_heads=2 * size)
    results: list[list[Tensor]] = []
    for function in (_twice, compiled(_twice)):
        *qkv, dout = case.shards()
        leaves = [x.requires_grad_() for x in qkv]
        torch.manual_seed(1)
        outs = function(*leaves, **case.arguments | {"dropout_seed": None})
        torch.autograd.backward(outs, (dout, dout))
        results.append([*outs, *(x.grad for x in leaves)])  # type: ignore[misc]
    same_bits(*results, case)
    assert not torch.equal(*results[0][:2])


def _twice(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, ...]:
    first, second = (ringray.ring_attention(q, k, v, **more) for _ in range(2))
    return first, second  # type: ignore[return-value]
