"""Biases of pairs: the same in fp64, and checks of every rank of a real ring."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import ringray
from ringray.partition import PARTITIONS
from ringray.traffic.walk import Unwalkable
from ringray_kernels import testing
from tests.support import compile_checks

NAN = float("nan")
SEED = 5
SHAPES = ((2, 4), (1, 4), (2, 1), (1, 1))  # batch entries and heads of a bias
ASKED: tuple[dict[str, Any], ...] = (
    {}, {"window": 7, "softcap": 1.5}, {"causal": False, "cu_seqlens": [0, 9, 37]},
    {"window": 5, "global_tokens": 3},
    {"dropout_p": 0.3, "dropout_seed": SEED, "cu_seqlens": [0, 9, 37]}, {"chunk": 9},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "window": 6},
)  # fmt: skip
WAYS = (
    ("ring", "planned"),
    ("allgather:1", "auto"),
    ("ring", "reverse"),
    ("bidirectional", "auto"),
    ("direct", "reverse"),
    ("staged", "auto"),
    ("double-ring:2", "auto"),
)


def problem(seq_len: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and dout, with a head dim of its own for v."""
    return list(testing.make_inputs(2, 4, 2, seq_len, 16, dtype, seed=3, value_dim=8))


def make_bias(shape: tuple[int, int], seq_len: int) -> Tensor:
    return torch.randn(*shape, seq_len, seq_len, generator=torch.Generator().manual_seed(1))


def seen_by(seq_len: int, *, causal: bool = True, **more: Any) -> Tensor:
    """The mask of a call."""
    mask = {name: more.get(name) for name in ("window", "chunk", "global_tokens")}
    cuts = more.get("cu_seqlens")
    mask["cu_seqlens"] = None if cuts is None else torch.tensor(cuts)
    return testing.visible(seq_len, causal=causal, **mask)


def truth(inputs: list[Tensor], bias: Tensor, seen: Tensor, **more: Any) -> dict[str, Tensor]:
    """Output and gradients by autograd in fp64."""
    *leaves, dout = [x.detach().double().requires_grad_() for x in (*inputs[:3], bias, inputs[3])]
    group = inputs[0].shape[1] // inputs[1].shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in leaves[1:3])
    scores = leaves[0] @ keys.mT * inputs[0].shape[3] ** -0.5
    if softcap := more.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + leaves[3]).masked_fill(~seen, -torch.inf)
    if (sinks := more.get("sinks")) is not None:  # one score more, whose weight has no value
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1)[..., : seen.shape[-1]]
    factors = testing.dropout_factors(inputs[0], more.get("dropout_p", 0.0), SEED)
    out = (weights if factors is None else weights * factors) @ values
    names = ("dq", "dk", "dv", "dbias")
    grads = torch.autograd.grad(out, leaves, dout.detach())
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def close(got: dict[str, Tensor], want: dict[str, Tensor], case: object) -> None:
    for name, right in want.items():
        loose = 5e-6 if got[name].dtype == torch.float32 else 1e-2
        error = float((got[name].detach().double() - right).norm() / right.norm())
        assert error < loose, (case, name, error)


def run(inputs: list[Tensor], bias: Tensor, **arguments: Any) -> dict[str, Tensor]:
    """Output and gradients of a call."""
    leaves = [x.clone().requires_grad_() for x in (*inputs[:3], bias)]
    out = ringray.ring_attention(*leaves[:3], attn_bias=leaves[3], **arguments)
    grads = torch.autograd.grad([out], leaves, inputs[3])
    return {"out": out, **dict(zip(("dq", "dk", "dv", "dbias"), grads, strict=True))}


def pairs(rank: int, size: int) -> None:
    """Partitions, transports and walks; padding and hidden pairs hold NaN."""
    seq_len = 37
    ways = itertools.cycle(way for way in WAYS if size % 2 == 0 or way[0] != "double-ring:2")
    backends, shapes = itertools.cycle(["aten", "reference", "aten"]), itertools.cycle(SHAPES)
    whole = problem(seq_len)
    for partition, asked in itertools.product(PARTITIONS, ASKED):
        (way, walk), shape, seen = next(ways), next(shapes), seen_by(seq_len, **asked)
        full = make_bias(shape, seq_len)
        shards = [ringray.shard(x, dim=2, partition=partition, pad_value=NAN) for x in whole]
        hidden = full.masked_fill(~seen, NAN)
        own = ringray.shard(hidden, dim=2, partition=partition, pad_value=NAN)
        own = pad(own, (0, size * own.shape[2] - seq_len), value=NAN)
        case = (partition, asked, way, walk, shape)
        options = {**asked, "partition": partition, "transport": way, "backward": walk}
        try:
            got = run(shards, own, backend=next(backends), seq_len=seq_len, **options)
        except Unwalkable:  # on every rank
            continue
        assert got["dbias"].shape == own.shape
        assert not got["dbias"][..., seq_len:].any()
        got = {
            name: ringray.unshard(x.detach(), dim=2, partition=partition, seq_len=seq_len)
            for name, x in got.items()
        }
        got["dbias"] = got["dbias"][..., :seq_len]
        close(got, truth(whole, full, seen, **asked), case)


def compiled(rank: int, size: int) -> None:
    """One operator in a graph has the bits of the eager call."""
    *shards, dout = (ringray.shard(x, dim=2) for x in problem(8 * size))
    own = ringray.shard(make_bias((2, 4), 8 * size), dim=2)
    results = []
    for function in (ringray.ring_attention, compile_checks.compiled(ringray.ring_attention)):
        leaves = [x.clone().requires_grad_() for x in (*shards, own)]
        out = function(*leaves[:3], attn_bias=leaves[3], window=5)
        results.append([out, *torch.autograd.grad([out], leaves, dout)])
    assert all(torch.equal(eager, traced) for eager, traced in zip(*results, strict=True))
