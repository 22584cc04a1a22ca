"""``context_parallel``: SDPA calls of a block go to the ring, and nothing else changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

import ringray
from tests.support import sdpa_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring

EVERY = (
    checks.manager_is_exact, checks.manager_is_dealt, checks.backward_anywhere,
    checks.buffers_are_dealt, checks.other_groups, checks.fsdp,
)  # fmt: skip


@pytest.mark.parametrize("size", [*exhaustive(1), 2, *exhaustive(4)])
def test_rings(size: int) -> None:
    on_ring(size, EVERY)


# In one process, without a group. A window tells routed calls from plain ones.


def inputs() -> torch.Tensor:
    return torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0))


def windowed(q: torch.Tensor) -> torch.Tensor:
    return ringray.ring_attention(q, q, q, window=1)


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


def test_outside_of_the_block_nothing_changes() -> None:
    q = inputs()
    want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with ringray.context_parallel(window=1):
        assert torch.equal(imported_by_name(q, q, q, is_causal=True), windowed(q))
    assert torch.equal(F.scaled_dot_product_attention(q, q, q, is_causal=True), want)
    with pytest.raises(KeyError), ringray.context_parallel(window=1):
        raise KeyError
    assert torch.equal(F.scaled_dot_product_attention(q, q, q, is_causal=True), want)
    with sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q.requires_grad_(), q, q).sum().backward()


def flash(q: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)[0]


@torch.library.custom_op("test_sdpa::their_attn", mutates_args=())
def their_attn(q: torch.Tensor) -> torch.Tensor:
    return q.clone()


def plain(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def in_math(q: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.jit.script(plain)(q)


def in_a_thread(q: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(plain, q).result()


@pytest.mark.parametrize(
    "attend",
    [
        torch.jit.script(plain), in_a_thread, flash, in_math, their_attn,
        torch.compile(flash, backend="aot_eager"),
        lambda q: torch.func.vmap(flash)(q[None])[0],
    ],
)  # fmt: skip
def test_no_attention_stays_local_beside_a_routed_call(attend: Any) -> None:
    q = inputs().requires_grad_()
    refused = pytest.raises((ValueError, RuntimeError), match=r"(was not|cannot be) routed")
    with ringray.context_parallel(window=1):
        plain(q)
        with ringray.context_parallel(window=1):  # an inner block does not end the guard
            plain(q)
        with refused:
            attend(q)
        for direct in (ringray.ring_attention, torch.compile(ringray.ring_attention)):
            if attend is flash:  # the op itself is exact
                out = direct(q, q, q, window=1)
                assert torch.equal(out, windowed(q))
    attend(q)


def traced(x: torch.Tensor) -> torch.Tensor:
    q = x.unflatten(-1, (8, 1)).mul(1).squeeze(-1)  # of a graph's input, and below within it
    q = q.unflatten(-1, (2, -1)).transpose(1, 2).float().mul(0.5)
    q = torch.cat([q[..., ::2], q[..., 1::2]], -1).norm(dim=-1, keepdim=True) * q
    q = q.reshape(q.shape).view(q.shape).repeat_interleave(2, 1).chunk(2, 1)[0].contiguous()
    a, b = F.rms_norm(q, (4,)).split(2, -1)
    return plain(torch.stack([a, F.silu(b)], -1).flatten(-2))


def block(x: torch.Tensor) -> torch.Tensor:
    with ringray.context_parallel(window=1):
        return traced(x)


@pytest.mark.parametrize("function", [traced, block])
def test_models_compile_in_one_graph_under_the_manager(function: Any) -> None:
    x = torch.randn(1, 16, 8, requires_grad=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    want = block(x)
    around = nullcontext() if function is block else ringray.context_parallel(window=1)
    with around:
        got = compiled(x)
    assert torch.equal(got, want)
    first, again = (torch.autograd.grad(out.sum(), x)[0] for out in (want, got))
    assert torch.equal(again, first)


def test_a_compiled_layer_in_a_reentrant_checkpoint_is_refused() -> None:
    x = torch.randn(1, 16, 8, requires_grad=True)
    refused = pytest.raises(ValueError, match="use_reentrant=True, expected use_reentrant=False")
    with refused, ringray.context_parallel(window=1):
        checkpoint(torch.compile(traced, backend="eager"), x, use_reentrant=True)


def test_buffers_may_be_dealt_in_place() -> None:
    """As PyTorch's own manager does; where an error ends the block, too."""
    q, kept = inputs(), torch.arange(15)
    places = torch.arange(32.0)[:, None].repeat(1, 3)[1:31:2]  # a view
    before, memory = places.clone(), id(places)
    arguments: dict[str, Any] = {
        "buffers": [places, kept], "buffer_seq_dims": [0, 0], "pad_values": [-1, 7]
    }  # fmt: skip
    for ends in (False, True):
        try:
            with ringray.context_parallel(**arguments, no_restore_buffers={kept}) as mine:
                assert (places.shape, kept.tolist()) == ((16, 3), [*range(15), 7])
                assert id(mine[0]) == memory
                assert (places[15] == -1).all()
                plain(q)
                if ends:
                    raise KeyError
        except KeyError:
            assert ends
        assert torch.equal(places, before)
        assert kept.shape == (16,)
        kept = torch.arange(15)
        arguments["buffers"][1] = kept


def test_the_inner_block_counts() -> None:
    q = inputs()
    with ringray.context_parallel(window=5):
        with ringray.context_parallel(window=1):
            inner = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        outer = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(inner, windowed(q))
    assert not torch.equal(outer, inner)


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


TORN = torch.zeros(8)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"buffers": [torch.zeros(2, 8)]}, "buffer_dims: got 0, expected one for each of 1"),
        (
            {"buffers": [torch.zeros(8)], "buffer_dims": [0], "buffer_seq_dims": [0]},
            "got buffer_seq_dims too",
        ),
        (
            {"buffers": [torch.zeros(8, requires_grad=True)], "buffer_seq_dims": [0]},
            "buffers: number 0 requires a gradient",
        ),
        (
            {"buffers": [torch.zeros(8)], "buffer_seq_dims": [0], "no_restore_buffers": [TORN]},
            "no_restore_buffers: 1 of them",
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
