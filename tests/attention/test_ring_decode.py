"""``ring_decode`` and ``ShardedKV`` on real rings of gloo processes, and in one process."""

from __future__ import annotations

import os

import pytest
import torch

import ringray
from ringray.attention import decode
from ringray_kernels import testing
from tests.support import decode_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring

EVERY = (
    checks.exact, checks.random_problems, checks.grows_evenly, checks.traffic,
    checks.timeouts_say_where,
)  # fmt: skip


@pytest.mark.parametrize("size", [*exhaustive(1, 2, 3), 4])
def test_rings(size: int) -> None:
    on_ring(size, EVERY)


@pytest.mark.exhaustive
def test_a_ring_of_seven() -> None:
    """Three ranks give their parts to others first; some hold no key of short contexts."""
    on_ring(7, (checks.exact, checks.traffic))


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
