"""Checks of every rank of a real ring: shards, and their way back."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import ringray
from ringray.attention.sharding import remember
from ringray.partition import PARTITIONS
from tests.support.ranks import Case
from tests.support.ring_truth import truth


def shards_remember_their_length(rank: int, size: int) -> None:
    """The first snippet of the README, for lengths that do not divide."""
    for seq_len, causal, partition in itertools.product((1, 7, 61), (True, False), PARTITIONS):
        case = Case(partition, seq_len=seq_len, causal=causal)
        q, k, v, dout = case.inputs
        leaves = [x.requires_grad_() for x in (q, k, v)]
        shards = [ringray.shard(x, dim=2, partition=partition) for x in leaves]
        out = ringray.ring_attention(*shards, partition=partition, causal=causal)
        assert isinstance(out, torch.Tensor)
        full = ringray.unshard(out, dim=2, partition=partition, gradients="mean")
        full.backward(dout)  # the whole loss, on every rank
        true = truth(case).want
        torch.testing.assert_close(full.double(), true.out, atol=1e-5, rtol=1e-4)
        for x, want in zip(leaves, (true.dq, true.dk, true.dv), strict=True):
            assert x.grad is not None
            if size > 1:
                dist.all_reduce(x.grad)
            torch.testing.assert_close(x.grad.double(), want, atol=1e-5, rtol=1e-4)
    other = remember(shards[1].clone(), 60, 62)
    with pytest.raises(ValueError, match=r"seq_len: got shards of sequences of \[60, 61\] rows"):
        ringray.ring_attention(shards[0], other, shards[2], partition=partition)
    with torch.no_grad():
        shards[1][:] = 1
    with pytest.raises(ValueError, match=r"seq_len: got None for a shard of 61 rows .* in place"):
        ringray.ring_attention(*shards, partition=partition)


def sharding(rank: int, size: int) -> None:
    """shard and unshard are inverse, along any dimension and for any type, and so are gradients."""
    for partition, length in itertools.product(PARTITIONS, (1, 7, 48)):
        for dim, dtype in ((0, torch.int64), (1, torch.float32), (-1, torch.bfloat16)):
            shape = [2, 3, 4]
            shape[dim] = length
            full = torch.arange(torch.tensor(shape).prod().item()).reshape(shape).to(dtype)
            mine = ringray.shard(full, dim=dim, partition=partition, pad_value=9)
            positions = ringray.local_positions(partition, length, size, rank)
            inside = positions < length
            assert mine.shape[dim] == len(positions)
            kept = mine.movedim(dim, 0)
            assert torch.equal(kept[inside], full.movedim(dim, 0)[positions[inside]])
            assert (kept[~inside] == 9).all()
            back = ringray.unshard(mine, dim=dim, partition=partition, seq_len=length)
            assert torch.equal(back, full)
        _gradients_of_sharding(partition, length, rank, size)


def _gradients_of_sharding(partition: str, length: int, rank: int, size: int) -> None:
    positions = ringray.local_positions(partition, length, size, rank)
    inside = positions < length
    full = torch.randn(length, 2, requires_grad=True)
    mine = ringray.shard(full, dim=0, partition=partition)
    mine.backward(torch.full_like(mine, rank + 1.0))
    expected = torch.zeros(length, 2)
    expected[positions[inside]] = rank + 1.0
    assert full.grad is not None
    assert torch.equal(full.grad, expected)

    local = torch.randn(len(positions), 2, requires_grad=True)
    whole = ringray.unshard(local, dim=0, partition=partition, seq_len=length)
    weights = torch.arange(length, dtype=torch.float32)[:, None].expand(length, 2)
    whole.backward(weights * (rank + 1))  # each rank its own: they are summed
    own = torch.zeros(len(positions), 2)
    own[inside] = weights[positions[inside]] * (size * (size + 1) // 2)
    assert local.grad is not None
    assert torch.equal(local.grad, own)
