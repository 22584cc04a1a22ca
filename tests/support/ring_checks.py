"""Checks of every rank of a real ring: results, gradients, shards and their way back."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringray
from ringray import transport
from ringray.attention.sharding import remember
from ringray.partition import NAMES, Partitioning
from ringray.traffic import walk
from ringray_kernels.checks import DTYPES
from tests.support.ranks import HEADS, Case, dealt
from tests.support.ring_truth import MASKS, truth, within_budget

SCORES: tuple[dict[str, Any], ...] = (
    {},
    {"with_sinks": True},
    {"softcap": 1.5, "value_dim": 8},
    {"with_sinks": True, "softcap": 0.7, "value_dim": 24},
    {"alibi": True, "window": 7, "global_tokens": 4},
    {"reach": 7, "with_sinks": True},
    {"reach": 20, "softcap": 1.5, "causal": False, "window": None},
    {"alibi": True, "softcap": 1.5, "causal": False, "window": None, "cu": (0, 30, 61), "batch": 2},
)


def exact(rank: int, size: int) -> None:
    """Every mask, where partitions, dtypes and walks back take turns; padding holds NaN."""
    turns = zip(itertools.cycle(NAMES), itertools.cycle(DTYPES), strict=False)
    for mask, (partition, dtype) in zip([*MASKS, *MASKS], turns, strict=False):
        case = Case(partition, dtype, **mask)
        within_budget(case, rank, size, truth(case))


def random_rings(rank: int, size: int, seed: int, count: int) -> None:
    """Random problems of every kind, the same on every rank, within the budget."""
    rng, done = random.Random(f"{seed} {size}"), 0
    names, ways = [*transport.TRANSPORTS, "allgather:2"], ["auto", *walk.BACKWARDS]
    while done < count:
        seq_len = rng.choice([61, 64, 97, 129, rng.randint(61, 140)])
        cuts = sorted(rng.choice([0, seq_len, rng.randint(0, seq_len)]) for _ in range(4))
        causal, kv_heads = rng.random() < 0.7, size * rng.choice([1, 2])
        case = Case(
            rng.choice(sorted(NAMES)), rng.choice(DTYPES), seq_len, causal,
            rng.choice([None, 0, 3, 70] if causal else [None, None, (3, 8), (None, 0)]),
            rng.choice([None, (0, *cuts, seq_len)]), rng.choice(["aten", "aten", "reference"]),
            rng.choice([1, 2]), rng.randrange(1 << 20), rng.choice([None, None, 16]),
            rng.choice([8, 16, 33]), kv_heads * rng.choice([1, 2]), kv_heads,
            rng.choice(names), rng.choice(ways),
            rng.choice([None, None, 0.0, -0.3, 1e-45, 2.0]), rng.random() < 0.5,
            rng.random() < 0.5, rng.choice([None, None, 5, 50]),
            rng.choice([None, None, 9]) if causal else None, rng.random() < 0.3,
            rng.choice([None, None, 1.5]), rng.choice([None, None, 24]), None,
            rng.random() < 0.3, rng.choice([0.0, 0.0, 0.3]),
        )  # fmt: skip
        case = _with_global_tokens(case, rng)
        if not case.alibi:
            case = replace(case, reach=rng.choice([None, None, 20]))
        try:
            within_budget(case, rank, size, truth(case))
            done += 1
        except walk.Unwalkable:
            pass


def _with_global_tokens(case: Case, rng: random.Random) -> Case:
    """The case with global tokens or without, where they go with its mask."""
    tokens = rng.choice([None, 1, 6, 80])
    local = (case.window is not None or case.chunk is not None) and not case.prefix
    return replace(case, global_tokens=tokens) if local else case


def documents_of_each_row(rank: int, size: int) -> None:
    """Batch rows with boundaries of their own: as each of them alone."""
    cuts = ((0, 20, 41, 61), (0, 9, 61), (0, 61))
    for way, backward, backend in (
        ("ring", "planned", "aten"), ("ring", "query-side", "reference"),
        ("allgather", "auto", "aten"), ("ulysses", "auto", "aten"),
    ):  # fmt: skip
        case = Case(
            "zigzag", batch=3, transport=way, backward=backward, backend=backend,
            heads=2 * size, kv_heads=size, prefix=7,
        )  # fmt: skip
        more = {**case.arguments, "cu_seqlens": cuts, "return_lse": True}
        *qkv, dout = (x.clone() for x in case.shards())
        leaves = [x.requires_grad_() for x in qkv]
        out, lse = ringray.ring_attention(*leaves, **more)
        got = [out, lse, *torch.autograd.grad(out, leaves, dout)]
        for row, cu in enumerate(cuts):
            own = [x[row : row + 1].detach().requires_grad_() for x in leaves]
            out, lse = ringray.ring_attention(*own, **{**more, "cu_seqlens": cu})
            want = [out, lse, *torch.autograd.grad(out, own, dout[row : row + 1])]
            for x, y in zip(got, want, strict=True):
                torch.testing.assert_close(x[row : row + 1], y, atol=2e-6, rtol=2e-5)


def some_gradients(rank: int, size: int) -> None:
    """Each input may need a gradient or not; no_grad keeps nothing."""
    case = Case("zigzag")
    want = case.run()
    for needed in itertools.product((False, True), repeat=3):
        *qkv, dout = case.shards()
        q, k, v = (x.requires_grad_(need) for x, need in zip(qkv, needed, strict=True))
        out, lse = ringray.ring_attention(q, k, v, return_lse=True, **case.arguments)
        assert out.requires_grad == any(needed)
        assert lse.requires_grad == any(needed)
        assert torch.equal(out.detach(), want["out"])
        if any(needed):
            out.backward(dout)
        for x, name in ((q, "dq"), (k, "dk"), (v, "dv")):
            if x.requires_grad:
                assert torch.equal(x.grad, want[name]), name
            else:
                assert x.grad is None
    q, k, v, _ = case.shards()
    with torch.no_grad():
        out = ringray.ring_attention(q.requires_grad_(), k, v, **case.arguments)
    assert not out.requires_grad


def strides(rank: int, size: int) -> None:
    """(B, S, H, D) memory, as models keep it, and shards that are views."""
    case = Case("striped", batch=2)
    want = case.run()
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.shards())
    for x in (q, k, v):
        x.requires_grad_()
    out = ringray.ring_attention(q, k, v, **case.arguments)
    out.backward(dout)
    for x, name in ((q.grad, "dq"), (k.grad, "dk"), (v.grad, "dv"), (out.detach(), "out")):
        torch.testing.assert_close(x, want[name], atol=1e-5, rtol=1e-5)


def only_out_or_only_lse(rank: int, size: int) -> None:
    """Ranks that make no use of lse, or of out, take part with zeros."""
    for way, backward in (("ring", "planned"), ("ring", "query-side"), ("ulysses", "auto")):
        case = Case(
            "zigzag", transport=way, backward=backward, with_dlse=True, heads=4 * size,
            kv_heads=2 * size,
        )  # fmt: skip
        *qkv, dout = case.shards(0.0)
        dlse, last = ringray.shard(case.dlse, dim=2), rank == size - 1
        gradients = []
        for skipped in (False, True):
            leaves = [x.detach().requires_grad_() for x in qkv]
            out, lse = ringray.ring_attention(*leaves, return_lse=True, **case.arguments)
            if not skipped:
                torch.autograd.backward((out, lse), (dout * (not last), dlse * last))
            elif last:
                lse.backward(dlse)
            else:
                out.backward(dout)
            gradients.append([x.grad for x in leaves])
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-6)


def scores(rank: int, size: int) -> None:
    """Checks each change of scores, and gradients of lse, by transports and walks back in turns."""
    heads = max(HEADS, 2 * size)
    ways = itertools.product(transport.TRANSPORTS, walk.BACKWARDS)
    for turn, (way, backward) in enumerate(ways):
        options = {"window": (None, 17)[turn % 2], **SCORES[turn % len(SCORES)]}
        case = Case(
            NAMES[turn % 5], DTYPES[turn % 3], transport=way, backward=backward,
            with_dlse=turn % 4 != 3, heads=2 * heads, kv_heads=heads, **options,
        )  # fmt: skip
        with contextlib.suppress(walk.Unwalkable):
            within_budget(case, rank, size, truth(case))


def uneven_rows(rank: int, size: int) -> None:
    """Rows of dout of any norm: every row of dq is right for itself."""
    heads = 2 * size
    for backward, transport_ in (*((one, "ring") for one in walk.BACKWARDS), ("auto", "ulysses")):
        case = Case(
            "zigzag", causal=False, backward=backward, transport=transport_, uneven=True,
            heads=heads, kv_heads=heads,
        )  # fmt: skip
        want, _, _, dout = truth(case)
        full = ringray.unshard(case.run()["dq"], dim=2, seq_len=case.seq_len)
        share = (full - want.dq).norm(dim=-1) / dout.double().norm(dim=-1)
        assert float(share.max()) < 1e-6, (case, float(share.max()))


def subgroups(rank: int, size: int) -> None:
    """Two rings side by side: ranks within a group are not ranks of the world."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group = groups[rank % 2]
    case = Case("contiguous", seq_len=64, seed=rank % 2)
    q, k, v, dout = (
        ringray.shard(x, dim=2, partition="contiguous", group=group) for x in case.inputs
    )
    for x in (q, k, v):
        x.requires_grad_()
    out = ringray.ring_attention(q, k, v, group=group, **case.arguments)
    out.backward(dout)
    want = truth(case).want
    for x, right in ((out.detach(), want.out), (k.grad, want.dk)):
        full = ringray.unshard(x, dim=2, partition="contiguous", group=group)
        torch.testing.assert_close(full.double(), right, atol=1e-5, rtol=1e-4)


def shards_remember_their_length(rank: int, size: int) -> None:
    """The first snippet of the README, for lengths that do not divide."""
    for seq_len, causal, name in itertools.product((1, 7, 61), (True, False), NAMES):
        case = Case(name, seq_len=seq_len, causal=causal)
        partition = case.dealt
        q, k, v, dout = case.inputs
        leaves = [x.requires_grad_() for x in (q, k, v)]
        shards = [ringray.shard(x, dim=2, partition=partition) for x in leaves]
        out = ringray.ring_attention(*shards, partition=partition, causal=causal)
        full = ringray.unshard(out, dim=2, partition=partition, gradients="mean")
        full.backward(dout)  # the whole loss, on every rank
        true = truth(case).want
        torch.testing.assert_close(full.double(), true.out, atol=1e-5, rtol=1e-4)
        for x, want in zip(leaves, (true.dq, true.dk, true.dv), strict=True):
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
    for name, length in itertools.product(NAMES, (1, 7, 48)):
        partition = dealt(name, length, cu_seqlens=[0, length // 3, length])
        for dim, dtype in ((0, torch.int64), (1, torch.float32), (-1, torch.bfloat16)):
            shape = [2, 3, 4]
            shape[dim] = length
            full = torch.arange(torch.tensor(shape).prod().item()).reshape(shape).to(dtype)
            mine = ringray.shard(full, dim=dim, partition=partition, pad_value=9)
            positions = ringray.local_positions(partition, length, size, rank)
            inside = positions < length
            assert mine.shape[dim] == len(positions)
            rows = mine.movedim(dim, 0)
            assert torch.equal(rows[inside], full.movedim(dim, 0)[positions[inside]])
            assert (rows[~inside] == 9).all()
            back = ringray.unshard(mine, dim=dim, partition=partition, seq_len=length)
            assert torch.equal(back, full)
        _gradients_of_sharding(partition, length, rank, size)


def _gradients_of_sharding(partition: Partitioning, length: int, rank: int, size: int) -> None:
    positions = ringray.local_positions(partition, length, size, rank)
    inside = positions < length
    full = torch.randn(length, 2, requires_grad=True)
    mine = ringray.shard(full, dim=0, partition=partition)
    mine.backward(torch.full_like(mine, rank + 1.0))
    expected = torch.zeros(length, 2)
    expected[positions[inside]] = rank + 1.0
    assert torch.equal(full.grad, expected)

    local = torch.randn(len(positions), 2, requires_grad=True)
    whole = ringray.unshard(local, dim=0, partition=partition, seq_len=length)
    weights = torch.arange(length, dtype=torch.float32)[:, None].expand(length, 2)
    whole.backward(weights * (rank + 1))  # each rank its own: they are summed
    own = torch.zeros(len(positions), 2)
    own[inside] = weights[positions[inside]] * (size * (size + 1) // 2)
    assert torch.equal(local.grad, own)
