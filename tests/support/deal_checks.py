"""Checks of every rank of a real ring: what a deal is refused for, how long it lives, and lists of
other libraries."""

from __future__ import annotations

import gc
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringray
from ringray.partition import BALANCED
from ringray_kernels import testing
from tests.support.compile_checks import compiled
from tests.support.decoder import HIDDEN

SEQ_LEN, CUTS = 96, (0, 8, 48, 96)


def attend(deal: Any, rows: ringray.Deal | None = None, cu: Any = CUTS, **options: Any) -> Tensor:
    """Attention of rows that are dealt, by ``rows`` if that is not the partition of the call."""
    q, k, v, _ = testing.make_inputs(1, 4, 2, SEQ_LEN, 16, torch.float32, seed=0)
    mine = (ringray.shard(x, dim=2, partition=rows or deal) for x in (q, k, v))
    cu_seqlens = None if cu is None else torch.tensor(cu)
    return ringray.ring_attention(*mine, partition=deal, cu_seqlens=cu_seqlens, **options)  # type: ignore[return-value]


def mistakes_are_told(rank: int, size: int) -> None:
    """A deal for another call is refused on every rank, in words of both; the ring goes on."""
    right = ringray.deal(SEQ_LEN, size, cu_seqlens=CUTS)
    prefixed, windowed = (ringray.deal(SEQ_LEN, size, **x) for x in ({"prefix": 3}, {"window": 5}))
    larger = ringray.deal(SEQ_LEN, size + 1, cu_seqlens=CUTS)
    shorter = ringray.deal(SEQ_LEN - size, size)
    x = torch.randn(1, SEQ_LEN, HIDDEN)
    own = ringray.shard(x, dim=1, partition=right)
    module = ringray.ContextParallelAttention(HIDDEN, 4)
    alone, other = "'balanced' alone, expected ringray.deal", f"deals {SEQ_LEN - size} tokens as "
    where: dict[str, Any] = {"dim": 1, "partition": BALANCED}
    asked: list[tuple[str, Callable[[], object]]] = [
        (r"cu_seqlens \(0, 8, 48, 96\), but the call has None", lambda: attend(right, cu=None)),
        (r"48, 96\), but the call has \(0, 8, 96\)", lambda: attend(right, cu=(0, 8, 96))),
        ("causal True, but the call has False", lambda: attend(right, causal=False)),
        (r"prefix \(3,\), but the call has None", lambda: attend(prefixed, cu=None)),
        (r"prefix None, but the call has \(3,\)", lambda: attend(right, prefix=3)),
        ("window 5, but the call has 6", lambda: attend(windowed, cu=None, window=6)),
        ("window 5, but the call has None", lambda: attend(windowed, cu=None)),
        ("96 tokens on .* but seq_len is 9 here", lambda: attend(right, cu=None, seq_len=9)),
        (f"world_size is {size} here", lambda: attend(larger, right)),
        (other, lambda: attend(shorter, right, cu=None)),
        ("cu_seqlens: expected boundaries", lambda: attend(BALANCED, right, cu=(0, 5))),
        (f"but seq_len is {SEQ_LEN} here", lambda: ringray.shard(x, dim=1, partition=shorter)),
        (alone, lambda: ringray.shard(x, **where)),
        (alone, lambda: ringray.unshard(own, **where)),
        (other, lambda: ringray.unshard(own, dim=1, partition=shorter)),
        (alone, lambda: ringray.local_positions(BALANCED, SEQ_LEN, size, rank)),
        (
            alone,
            lambda: ringray.ShardedKV.of_shards(
                own[None], own[None], capacity=99, partition=BALANCED
            ),
        ),
        (other, lambda: module(own, partition=shorter)),
        ("but the call has None", lambda: module(own, partition=right)),
        (
            "but the call has None",
            lambda: compiled(module)(own, partition=right),
        ),
        (f"world_size is {size} here", lambda: ringray.local_positions(larger, SEQ_LEN, size, 0)),
    ]  # fmt: skip
    for says, call in asked:
        with pytest.raises(ValueError, match=says):
            call()
    whole = attend(right)
    for limit in ({"window": 3}, {"chunk": 4}):  # a layer may see less
        assert not torch.equal(attend(right, **limit), whole)
    # Documents without a token are none.
    assert torch.equal(attend(right, cu=(0, 8, 8, 48, 96, 96)), whole)


def ranks_learn(rank: int, size: int) -> None:
    """What one rank deals otherwise, or is refused for, all ranks know before rows are sent."""
    right = ringray.deal(SEQ_LEN, size, cu_seqlens=CUTS)
    weights = [1.0, 2.0, 1.0, 1.0][:size]
    heavier = ringray.deal(SEQ_LEN, size, cu_seqlens=CUTS, weights=weights)
    other = ringray.deal(SEQ_LEN, size, cu_seqlens=(0, 9, SEQ_LEN))
    assert right.dealt != heavier.dealt
    last = rank == size - 1
    own = torch.randn(1, SEQ_LEN // size, HIDDEN)
    for function in (attend, lambda deal: ringray.unshard(own, dim=1, partition=deal)):
        with pytest.raises(ValueError, match=r"ranks disagree about the problem: partition: Deal"):
            function(heavier if last else right)  # type: ignore[operator]
    says = "but the call has" if last else rf"the arguments of rank\(s\) {size - 1} were refused"
    with pytest.raises(ValueError, match=says):
        attend(other if last else right)
    attend(right)


def deals_outlive_their_callers(rank: int, size: int) -> None:
    """A backward pass comes after a deal, and an equal copy of it, have been dropped."""
    rows = torch.randn(SEQ_LEN // size, 2, requires_grad=True)

    def whole(x: Tensor, deal: ringray.Deal) -> Tensor:
        return ringray.unshard(x, dim=0, partition=deal)

    for number, function in enumerate((whole, compiled(whole))):
        seq_len = SEQ_LEN - 1  # and a row of padding
        bounds = (0, 5 + number, seq_len)  # which no call has had
        listed = ringray.deal(seq_len, size, cu_seqlens=bounds).indices()
        deal = ringray.deal(seq_len, size, cu_seqlens=bounds, partition=listed)
        pickle.loads(pickle.dumps(deal))
        gc.collect()
        full = function(rows, deal)
        own = torch.tensor(listed).view(size, -1)[rank]
        assert torch.equal(full[own[own < seq_len]], rows[own < seq_len])
        del deal
        ringray.attention.problem.positions.cache_clear()
        gc.collect()
        (mine,) = torch.autograd.grad(full, rows, torch.ones_like(full))
        assert (mine[own < seq_len] == size).all()


def lists_of_pytorch(rank: int, size: int) -> None:
    """The lists of PyTorch's balancers are deals; those of documents with each part sorted."""
    balancers = pytest.importorskip(
        "torch.distributed.tensor.experimental._context_parallel._load_balancer"
    )
    seq_len, cuts = 16 * size, (0, 4 * size, 6 * size, 16 * size)
    whole = balancers._HeadTailLoadBalancer(seq_len, size, "cpu")._generate_indices()
    lengths = [b - a for a, b in itertools.pairwise(cuts)]
    by_document = balancers._PerDocumentHeadTailLoadBalancer([lengths], size, "cpu")
    parts = by_document._generate_indices().view(size, -1).sort(1).values.view(1, -1)
    *qkv, _ = testing.make_inputs(1, 4, 2, seq_len, 16, torch.float32, seed=0)
    for indices, cu in ((whole, None), (parts, torch.tensor(cuts))):
        deal = ringray.deal(seq_len, size, cu_seqlens=cu, partition=indices)
        assert deal.indices() == indices[0].tolist()
        mine = [ringray.shard(x, dim=2, partition=deal) for x in qkv]
        assert torch.equal(mine[0], qkv[0][:, :, indices[0].view(size, -1)[rank].long()])
        out = ringray.ring_attention(*mine, partition=deal, cu_seqlens=cu, transport="direct")
        seen = testing.visible(seq_len, causal=True, cu_seqlens=cu)
        want = testing.oracle(*qkv, None, seen, scale=16**-0.5).out
        got = ringray.unshard(out, dim=2, partition=deal)  # type: ignore[arg-type]
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)


def layers_agree(rank: int, size: int) -> None:
    """Layers of one model, with a window, chunks or neither, that only name ``balanced`` are dealt
    alike, as by ``ringray.deal`` for their documents."""
    cu, shape = (0, 40, 61, 96), (1, 2, 96, 8)
    torch.manual_seed(0)
    whole = torch.randn(3, *shape)
    dealt = ringray.deal(96, size, cu_seqlens=cu)
    shards = [ringray.shard(x, dim=2, partition=dealt) for x in whole]
    for limits in ({}, {"window": 5}, {"chunk": 16}, {"window": 3, "global_tokens": 2}):
        options: dict[str, Any] = {"cu_seqlens": cu, "seq_len": 96, **limits}
        by_name = ringray.ring_attention(*shards, partition="balanced", **options)
        by_deal = ringray.ring_attention(*shards, partition=dealt, **options)
        assert torch.equal(by_name, by_deal), limits
