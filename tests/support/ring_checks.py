"""Checks of every rank of a real ring: results, gradients and traffic."""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import ringray
from ringray import transport
from ringray.comm.ring import METER
from ringray.partition import PARTITIONS, padded_length
from ringray.traffic import walk
from ringray.traffic.geometry import Layout
from ringray.traffic.mask import Mask
from ringray_kernels.checks import DTYPES
from tests.support.ranks import HEAD_DIM, HEADS, KV_HEADS, NAN, Case
from tests.support.ring_truth import MASKS, truth, within_budget

if TYPE_CHECKING:
    from torch import Tensor


def exact(rank: int, size: int) -> None:
    """All partitions × masks, where dtypes take turns: within the budget, padding holding NaN."""
    for mask, dtype in zip(MASKS, itertools.cycle(DTYPES), strict=False):
        true = truth(Case("zigzag", dtype, **mask))
        for partition in PARTITIONS:
            within_budget(Case(partition, dtype, **mask), rank, size, true)


def random_problems(rank: int, size: int) -> None:
    """Random lengths, batches and backends, the same on every rank."""
    rng = random.Random(size)
    for at in range(12):
        seq_len = rng.choice([1, 2, 7, 64, 129])
        cuts = sorted(rng.randint(0, seq_len) for _ in range(rng.randint(0, 4)))
        causal = rng.random() < 0.7
        case = Case(
            rng.choice(sorted(PARTITIONS)), rng.choice(DTYPES), seq_len, causal,
            rng.choice([None, 0, 3, 70]) if causal else rng.choice([None, (3, 8), (None, 0)]),
            rng.choice([None, (0, *cuts, seq_len)]), rng.choice(["aten", "reference"]),
            rng.choice([1, 2]), at, chunk=rng.choice([None, 5, 50]),
            prefix=rng.choice([None, 0, 9]) if causal else None,
        )  # fmt: skip
        case = _with_global_tokens(case, rng)
        got = case.run()
        alone = _alone(case)
        for name, x in got.items():
            full = ringray.unshard(x, dim=2, partition=case.partition, seq_len=seq_len)
            assert not full.isnan().any(), (case, name)
            loose = 1e-4 if case.dtype == torch.float32 else 6e-2
            torch.testing.assert_close(full, alone[name], atol=loose, rtol=loose)


def random_rings(rank: int, size: int, seed: int, count: int) -> None:
    """Random problems of every kind, the same on every rank, within the budget."""
    rng, done = random.Random(f"{seed} {size}"), 0
    names, ways = [*transport.TRANSPORTS, "allgather:2"], ["auto", *walk.BACKWARDS]
    while done < count:
        seq_len = rng.choice([61, 64, 97, 129, rng.randint(61, 140)])
        cuts = sorted(rng.choice([0, seq_len, rng.randint(0, seq_len)]) for _ in range(4))
        causal, kv_heads = rng.random() < 0.7, size * rng.choice([1, 2])
        case = Case(
            rng.choice(sorted(PARTITIONS)), rng.choice(DTYPES), seq_len, causal,
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


def _alone(case: Case) -> dict[str, Tensor]:
    """The same problem by the reference, in one process."""
    from ringray_kernels import backward, forward
    from ringray_kernels.intervals import intervals, visible_ranges

    q, k, v, dout = case.inputs
    positions = torch.arange(case.seq_len)
    ranges = [
        [x[None] for x in intervals(low, high, positions)]
        for low, high in visible_ranges(positions, case.seq_len, **case.mask)
    ]
    more: dict[str, Any] = {"scale": HEAD_DIM**-0.5, "backend": "reference"}
    state = None
    for one in ranges:
        state = forward(q, k, v, *one, state=state, **more)
    assert state is not None
    out, lse = state.out.to(q.dtype), state.lse
    delta = (dout.float() * out.float()).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    for one in ranges:
        backward(dout, q, k, v, lse, delta, *one, dq=dq, dk=dk, dv=dv, **more)
    grads = {"dq": dq.to(q.dtype), "dk": dk.to(q.dtype), "dv": dv.to(q.dtype)}
    return {"out": out, "lse": lse, **grads}


def documents_of_each_row(rank: int, size: int) -> None:
    """Batch rows with boundaries of their own: as each of them alone."""
    cuts = ((0, 20, 41, 61), (0, 9, 61), (0, 61))
    ways = [("ring", "planned"), ("ring", "query-side"), ("allgather", "auto"), ("ulysses", "auto")]
    for backend, (way, backward) in itertools.product(("aten", "reference"), ways):
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


def repeatable(rank: int, size: int) -> None:
    """Two runs are bitwise equal, and nothing depends on what padding holds."""
    for partition, dtype in itertools.product(PARTITIONS, DTYPES):
        case = Case(partition, dtype, window=40)
        a, b, c = case.run(NAN), case.run(NAN), case.run(3.0)
        for name in a:
            assert torch.equal(a[name], b[name]), f"{case}: {name} differs between runs"
            assert torch.equal(a[name], c[name]), f"{case}: {name} depends on padding"


def traffic(rank: int, size: int) -> None:
    """The walk's rows are sent: K and V in their dtype, dK and dV in fp32."""
    for partition, mask, dtype in itertools.product(
        PARTITIONS,
        ({}, {"causal": False}, {"window": 7}, {"chunk": 16, "prefix": 20},
         {"window": 7, "global_tokens": 5}, {"window": 7, "shared_prefix": 5}),
        DTYPES[:2],
    ):  # fmt: skip
        case = Case(partition, dtype, 64 if size != 3 else 66, **mask)
        padded = padded_length(partition, case.seq_len, size)
        prefix = None if case.prefix is None else (case.prefix,)
        described = Mask(
            case.seq_len, case.causal, case.window, None, case.chunk, prefix, case.global_tokens,  # type: ignore[arg-type]
            case.shared_prefix,
        )  # fmt: skip
        q, k, v, dout = case.shards()
        for x in (q, k, v):
            x.requires_grad_()
        sent, messages = METER.sent_bytes, METER.messages
        out = ringray.ring_attention(q, k, v, **case.arguments)
        forward = METER.sent_bytes - sent
        forward_messages = METER.messages - messages
        sent = METER.sent_bytes
        out.backward(dout)
        backward = METER.sent_bytes - sent
        row = 2 * KV_HEADS * HEAD_DIM
        routes = transport.plan("ring", size, HEADS, KV_HEADS).routes
        costs = walk.costs(dtype.itemsize, 1, HEADS, KV_HEADS, HEAD_DIM)
        walks = walk.choose(Layout(partition, padded, size), described, routes, "planned", costs)
        there, back = walks.forward.sent("forward"), walks.backward.sent("backward")
        total = torch.tensor([forward, backward, forward_messages])
        if size > 1:
            dist.all_reduce(total)
        assert total.tolist() == [
            there.chunk_rows * row * dtype.itemsize,
            row * (back.chunk_rows * dtype.itemsize + back.sum_rows * 4),
            2 * there.messages,
        ], (case, size)


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
                assert x.grad is not None
                assert torch.equal(x.grad, want[name]), name
            else:
                assert x.grad is None
    q, k, v, _ = case.shards()
    with torch.no_grad():
        out = ringray.ring_attention(q.requires_grad_(), k, v, **case.arguments)
    assert isinstance(out, torch.Tensor)
    assert not out.requires_grad


def strides(rank: int, size: int) -> None:
    """(B, S, H, D) memory, as models keep it, and shards that are views."""
    case = Case("striped", batch=2)
    want = case.run()
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.shards())
    for x in (q, k, v):
        x.requires_grad_()
    out = ringray.ring_attention(q, k, v, **case.arguments)
    assert isinstance(out, torch.Tensor)
    out.backward(dout)
    for x, name in ((q.grad, "dq"), (k.grad, "dk"), (v.grad, "dv"), (out.detach(), "out")):
        assert x is not None
        torch.testing.assert_close(x, want[name], atol=1e-5, rtol=1e-5)


def gradients_of_lse(rank: int, size: int) -> None:
    """Out and lse in one loss, on some ranks or all, and each alone."""
    heads = max(HEADS, 2 * size)
    for at, (transport_, backward) in enumerate(
        itertools.product(transport.TRANSPORTS, walk.BACKWARDS)
    ):
        partition, dtype = list(PARTITIONS)[at % 4], DTYPES[at % 3]
        case = Case(
            partition, dtype, transport=transport_, backward=backward, with_dlse=True,
            heads=2 * heads, kv_heads=heads, window=(None, 17)[at % 2],
        )  # fmt: skip
        try:
            within_budget(case, rank, size, truth(case))
        except walk.Unwalkable:
            continue
        # Ranks that make no use of lse, or of out alone, take part with zeros.
        *qkv, dout = case.shards(0.0)
        dlse = ringray.shard(case.dlse, dim=2, partition=partition)
        found = []
        for some in (False, True):
            q, k, v = (x.detach().requires_grad_() for x in qkv)
            out, lse = ringray.ring_attention(q, k, v, return_lse=True, **case.arguments)
            if some and rank == size - 1:
                lse.backward(dlse)
            elif some:
                out.backward(dout)
            else:
                idle = rank == size - 1
                torch.autograd.backward((out, lse), (dout * (not idle), dlse * idle))
            found.append([x.grad for x in (q, k, v)])
        for a, b in zip(*found, strict=True):
            tight = 1e-6 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(a, b, atol=20 * tight, rtol=tight)


def models(rank: int, size: int) -> None:
    """Features that models ask for, by every transport and backward walk."""
    heads = max(HEADS, 2 * size)
    asked: tuple[dict[str, Any], ...] = (
        {"with_sinks": True},
        {"softcap": 1.5, "value_dim": 8},
        {"with_sinks": True, "softcap": 0.7, "value_dim": 24},
        {"alibi": True},
        {"alibi": True, "window": 7, "global_tokens": 4},
        {"reach": 7, "with_sinks": True},
        {"reach": 20, "softcap": 1.5, "causal": False},
        {"alibi": True, "softcap": 1.5, "causal": False, "cu": (0, 30, 61), "batch": 2},
    )
    ways = itertools.product(transport.TRANSPORTS, walk.BACKWARDS, asked)
    for at, (transport_, backward, more) in enumerate(ways):
        more = {"window": (None, 17)[at % 2] if more.get("causal", True) else None, **more}
        case = Case(
            list(PARTITIONS)[at % 4], DTYPES[at % 3], transport=transport_, backward=backward,
            with_dlse=bool(at // 3 % 2), heads=2 * heads, kv_heads=heads, **more,
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
        assert want.dq is not None
        share = (full - want.dq).norm(dim=-1) / dout.double().norm(dim=-1)
        assert float(share.max()) < 1e-6, (case, float(share.max()))


def subgroups(rank: int, size: int) -> None:
    """Two rings side by side: ranks within a group are not ranks of the world."""
    if size != 4:
        return
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group = groups[rank % 2]
    case = Case("contiguous", seq_len=64, seed=rank % 2)
    q, k, v, dout = (
        ringray.shard(x, dim=2, partition="contiguous", group=group) for x in case.inputs
    )
    for x in (q, k, v):
        x.requires_grad_()
    out = ringray.ring_attention(q, k, v, group=group, **case.arguments)
    assert isinstance(out, torch.Tensor)
    out.backward(dout)
    alone = _alone(case)
    for x, name in ((out.detach(), "out"), (k.grad, "dk")):
        assert x is not None
        full = ringray.unshard(x, dim=2, partition="contiguous", group=group)
        torch.testing.assert_close(full, alone[name], atol=1e-5, rtol=1e-4)
