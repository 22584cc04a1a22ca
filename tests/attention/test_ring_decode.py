"""``ring_decode`` and ``ShardedKV`` on real rings of gloo processes, and in one process."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringray
from ringray.attention import decode
from ringray.comm.batch import METER
from ringray.partition import NAMES
from ringray.traffic.tree import meetings
from ringray_kernels import testing
from tests.support.exhaustive import exhaustive
from tests.support.ranks import SHORT, dealt, on_ring


def chunks_of_tokens(
    prefill: int, chunks: tuple[int, ...], rank: int, size: int, *, batch: int = 2, heads: int = 4,
    kv_heads: int = 2, head_dim: int = 16, partition: str = "zigzag", window: int | None = None,
    dtype: torch.dtype = torch.float32, scale: float | None = None, backend: str = "auto",
    value_dim: int | None = None, softcap: float | None = None, with_sinks: bool = False,
    global_tokens: int | None = None,
) -> None:  # fmt: skip
    """A prefill dealt by a partition, then chunks of new tokens: each is exact, on all ranks."""
    length = prefill + sum(chunks)
    inputs = testing.make_inputs(batch, heads, kv_heads, length, head_dim, dtype, seed=length)
    q, k, v, _ = inputs
    if value_dim is not None:
        v = v.repeat(1, 1, 1, 3)[..., :value_dim].contiguous()
    scoring: dict[str, Any] = {"softcap": softcap, "sinks": q[0, :, 0, 0] if with_sinks else None}
    if prefill:
        rule = dealt(partition, prefill, cu_seqlens=(0, prefill // 3, prefill))
        shards = [
            ringray.shard(x[:, :, :prefill], dim=2, partition=rule, pad_value=torch.nan)
            for x in (k, v)
        ]
        cache = ringray.ShardedKV.of_shards(*shards, capacity=length, partition=rule)
    else:
        cache = ringray.ShardedKV.empty(
            batch, kv_heads, head_dim, capacity=length, dtype=dtype, value_head_dim=value_dim
        )
    cache.buffers[0][:, :, cache.rows :] = torch.nan  # of no token
    cache.buffers[1][:, :, cache.rows :] = torch.nan
    for count in chunks:
        new = slice(cache.length, cache.length + count)
        cache.append(k[:, :, new], v[:, :, new], position=cache.length)
        out, lse = ringray.ring_decode(
            q[:, :, new], cache, window=window, scale=scale, backend=backend, return_lse=True,
            global_tokens=global_tokens, **scoring,
        )  # fmt: skip
        whole, mask = slice(cache.length), {"window": window, "global_tokens": global_tokens}
        seen = testing.visible(cache.length, causal=True, **mask)[-count:]
        inputs = (q[:, :, new], k[:, :, whole], v[:, :, whole], None, seen)
        factor = head_dim**-0.5 if scale is None else scale
        want = testing.oracle(*inputs, scale=factor, **scoring).out
        flash = testing.yardstick(*inputs, scale=factor, causal=False, **scoring).out
        assert testing.budget_share(out, want, flash, want) <= 1
        assert (out.dtype, lse.dtype, lse.shape) == (dtype, torch.float32, out.shape[:3])
        assert lse.isfinite().all()
        for x in (out.contiguous(), lse.contiguous()):
            everyone = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(everyone, x)
            assert all(torch.equal(theirs, x) for theirs in everyone), "ranks differ"
    assert (cache.positions[1:] > cache.positions[:-1]).all()
    assert torch.equal(cache.k, k[:, :, cache.positions])
    assert torch.equal(cache.v, v[:, :, cache.positions])


def exact(rank: int, size: int) -> None:
    """Odd lengths, chunks of one and more tokens, shared heads, a window; more ranks than rows."""
    check = partial(chunks_of_tokens, rank=rank, size=size)
    for partition in NAMES:
        check(37, (1, 1, 5, 1), partition=partition)
    check(0, (1, 1, 7, 1, 3))
    check(1, (1,))
    check(41, (1, 9, 1), window=6, heads=6)
    check(53, (1, 2), window=0)
    check(41, (1, 9, 1), window=6, global_tokens=3, heads=6)
    check(0, (2, 5, 1), window=1, global_tokens=4, with_sinks=True)
    check(61, (3, 1), dtype=torch.bfloat16, scale=0.5, heads=2)
    check(19, (1, 2), backend="reference", batch=1)
    check(29, (1, 4), value_dim=24, softcap=2.0, with_sinks=True, heads=6)
    check(0, (1, 4), value_dim=8, window=3, with_sinks=True)


def random_problems(rank: int, size: int) -> None:
    """As ``exact``, for problems that all ranks draw alike; long enough for several ranges."""
    draw = random.Random(size)
    for _ in range(4):
        chunks = tuple(draw.choice((1, 1, 2, 17, 70)) for _ in range(draw.randint(1, 3)))
        kv_heads = draw.choice((1, 2, 3))
        chunks_of_tokens(
            draw.choice((0, 5, 300, 1201)), chunks, rank, size, batch=draw.choice((1, 2)),
            heads=kv_heads * draw.choice((1, 4)), kv_heads=kv_heads, head_dim=draw.choice((8, 40)),
            partition=draw.choice(NAMES),
            **draw.choice((
                {}, {"window": 3}, {"window": 200, "global_tokens": 4},
                {"window": 3, "global_tokens": 250},
            )),
        )  # fmt: skip


def grows_evenly(rank: int, size: int) -> None:
    """New tokens go to the ranks in turn; what is cropped is forgotten."""
    x = torch.randn(1, 1, 7, 4)
    cache = ringray.ShardedKV.empty(1, 1, 4, capacity=40, dtype=torch.float32)
    for count in (1, 2, 7, 5):
        cache.append(x[:, :, :count], x[:, :, :count])
        assert cache.rows in (cache.length // size, -(-cache.length // size))
    assert cache.length == 15
    cache.crop(8)
    assert cache.positions.tolist() == list(range(rank, 8, size))
    with pytest.raises(ValueError, match="length: got 9, expected 0 to 8 tokens"):
        cache.crop(9)


def traffic(rank: int, size: int) -> None:
    """A step sends one message of outputs and lse for each meeting of the tree, and no K or V."""
    k, v = (torch.randn(2, 2, 12 * size, 16) for _ in range(2))
    shards = [ringray.shard(x, dim=2) for x in (k, v)]
    cache = ringray.ShardedKV.of_shards(*shards, capacity=12 * size + 3)
    cache.append(k[:, :, :3], v[:, :, :3])
    before = METER.snapshot()
    ringray.ring_decode(torch.randn(2, 4, 3, 16), cache)
    used = METER.since(before)
    sends = sum(meeting.sends for meeting in meetings(size, rank))
    assert (used.messages, used.sent_bytes) == (sends, sends * 2 * 4 * 3 * (16 + 1) * 4)


def timeouts_say_where(rank: int, size: int) -> None:
    """A rank that skips a step leaves the others with the hop, the rank and a hint."""
    group = dist.new_group(timeout=SHORT)
    cache = ringray.ShardedKV.empty(1, 2, 8, capacity=4, dtype=torch.float32, group=group)
    x = torch.randn(1, 2, size, 8)
    cache.append(x, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGRAY_AGREEMENT", "0")
        if rank != size - 1:
            with pytest.raises(RuntimeError, match=rf"rank {rank}, decoding.*in the same order"):
                ringray.ring_decode(x[:, :, -1:], cache, group=group)
    dist.barrier()


EVERY = (
    exact, random_problems, grows_evenly, traffic,
    timeouts_say_where,
)  # fmt: skip


@pytest.mark.parametrize("size", [*exhaustive(1, 2, 3), 4])
def test_rings(size: int) -> None:
    on_ring(size, EVERY)


@pytest.mark.exhaustive
def test_a_ring_of_seven() -> None:
    """Three ranks give their parts to others first; some hold no key of short contexts."""
    on_ring(7, (exact, traffic))


interpreter = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="CPU tensors need Triton's interpreter"
)


@pytest.mark.parametrize(
    ("backend", "threads"),
    [("aten", 1), ("aten", 2), ("reference", 5), pytest.param("triton", 5, marks=interpreter)],
)
def test_ranges_of_keys_are_one_attention(
    backend: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that all queries see are computed in ranges, of which the last rows are a rest."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(decode, "_THREAD_ELEMENTS", 1 << 11)
    monkeypatch.setattr(decode, "_LEAST_KEYS", 64)
    q, k, v, _ = testing.make_inputs(2, 4, 2, 701, 16, torch.float32, seed=0)
    cache = ringray.ShardedKV.of_shards(k, v, capacity=701, partition="contiguous")
    ranges = decode._ranges(700, torch.empty(1, 4, 4, 16))
    assert ranges == 1 if threads == 1 else ranges > 3
    cases = [(1, None), (3, 300), (2, None), (1, 650), (40, 500)]
    for tokens, window in cases[: 1 if backend == "triton" else None]:  # it is interpreted
        out = ringray.ring_decode(q[:, :, -tokens:], cache, window=window, backend=backend)
        seen = testing.visible(701, causal=True, window=window)[-tokens:]
        want = testing.oracle(q[:, :, -tokens:], k, v, None, seen, scale=16**-0.5).out
        torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=1e-5)


def test_keys_are_not_copied() -> None:
    """A step allocates far less than the keys that it reads, in any number of ranges."""
    from ringray.lab.trial.measurement import peak_memory

    k = torch.randn(1, 2, 1 << 15, 16)
    cache = ringray.ShardedKV.of_shards(k, k, capacity=1 << 15)
    q = torch.randn(1, 8, 1, 16)
    ringray.ring_decode(q, cache)
    peak = peak_memory(lambda: ringray.ring_decode(q, cache), k.device)
    assert peak < k.numel() * k.element_size() / 8


def test_autocast_is_followed() -> None:
    x = torch.randn(1, 2, 8, 8)
    cache = ringray.ShardedKV.of_shards(x.bfloat16(), x.bfloat16(), capacity=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ringray.ring_decode(x[:, :, -1:], cache)
    want = ringray.ring_decode(x[:, :, -1:].bfloat16(), cache)
    assert torch.equal(out, want)
