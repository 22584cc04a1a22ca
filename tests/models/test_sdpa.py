"""``context_parallel``: SDPA calls of a block go to the ring, and nothing else changes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

import ringray
from tests.support import sdpa_checks as checks
from tests.support.ranks import on_ring

EVERY = (
    checks.manager_is_exact, checks.backward_anywhere, checks.nobody_waits_for_a_refused_rank,
    checks.buffers_are_dealt, checks.other_groups, checks.fsdp,
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rings(size: int) -> None:
    on_ring(size, EVERY)


# In one process, without a group. A window tells routed calls from plain ones.


def inputs() -> torch.Tensor:
    return torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0))


def windowed(q: torch.Tensor) -> torch.Tensor:
    out = ringray.ring_attention(q, q, q, window=1)
    assert isinstance(out, torch.Tensor)
    return out


def test_every_way_to_call_it_is_routed() -> None:
    q = inputs()
    mha: dict[str, Any] = {"query": q, "key": q, "value": q, "is_causal": True}
    with ringray.context_parallel(window=1):
        ways = [
            F.scaled_dot_product_attention(q, q, q, None, 0.0, True),
            F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=8**-0.5),
            F.scaled_dot_product_attention(**mha),
            imported_by_name(q, q, q, is_causal=True),
            torch.ops.aten.scaled_dot_product_attention(q, q, q, None, 0.0, True),
            torch.ops.aten.scaled_dot_product_attention.default(q, q, q, is_causal=True),
        ]
    for way in ways:
        assert torch.equal(way, windowed(q))


def test_outside_of_the_block_and_in_other_threads_nothing_changes() -> None:
    q = inputs()
    want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    others = []

    def plain() -> None:
        others.append(F.scaled_dot_product_attention(q, q, q, is_causal=True))

    with ringray.context_parallel(window=1):
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()
        assert torch.equal(imported_by_name(q, q, q, is_causal=True), windowed(q))
    plain()
    with pytest.raises(KeyError), ringray.context_parallel(window=1):
        raise KeyError
    plain()
    assert len(others) == 3
    assert all(torch.equal(other, want) for other in others)


def test_the_inner_block_counts() -> None:
    q = inputs()
    with ringray.context_parallel(window=5):
        with ringray.context_parallel(window=1):
            inner = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        outer = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(inner, windowed(q))
    assert not torch.equal(outer, inner)


def test_autocast_casts_what_it_would_cast() -> None:
    q = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        want = F.scaled_dot_product_attention(q, q, q.bfloat16(), is_causal=True)
        with ringray.context_parallel():
            got = F.scaled_dot_product_attention(q, q, q.bfloat16(), is_causal=True)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_by_other_means_is_refused() -> None:
    x = torch.randn(1, 8, 16)
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=16, batch_first=True).eval()
    refused = pytest.raises(ValueError, match="attention_forward, which cannot be routed")
    with torch.no_grad(), refused, ringray.context_parallel():  # its fast path would be taken
        layer(x)
    never = pytest.raises(ValueError, match="never called scaled_dot_product_attention")
    with never, ringray.context_parallel():
        (x @ x.mT).softmax(-1) @ x
    refused = pytest.raises((ValueError, RuntimeError), match="flex_attention, which cannot be")
    with refused, ringray.context_parallel():
        flex_attention(*[inputs()] * 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"partition": "zag"}, "partition: got 'zag'"),
        ({"buffers": [torch.zeros(2, 8)]}, "buffer_dims: got 0, expected one for each of 1"),
        (
            {"buffers": [torch.zeros(2, 8)], "buffer_dims": [1], "pad_values": [0, 0]},
            "pad_values: got 2, expected one for each of 1",
        ),
        (
            {"buffers": [torch.zeros(2, 8)], "buffer_dims": [2]},
            r"buffer_dims: got 2 for shape \(2, 8\)",
        ),
        (
            {"buffers": [torch.zeros(2, 8), torch.zeros(2, 9)], "buffer_dims": [1, 1]},
            "buffers: number 1 has 9 rows in dimension 1, expected the 8",
        ),
        (
            {"buffers": [torch.zeros(2, 8)], "buffer_dims": [1], "seq_len": 6},
            "buffers: number 0 has 8 rows in dimension 1, expected the 6",
        ),
    ],
)
def test_wrong_buffers_are_told(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says), ringray.context_parallel(**arguments):
        pass
