"""The module, the loss and their wrappers: on real rings, and what one process can see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ringray
from ringray.nn import next_token_labels
from tests.support import nn_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring

EVERY = (
    checks.module_is_exact, checks.loss_is_global, checks.checkpointing_changes_nothing,
    checks.ddp, checks.fsdp,
)  # fmt: skip


@pytest.mark.parametrize("size", [2, *exhaustive(1)])
def test_rings(size: int) -> None:
    on_ring(size, EVERY)


def test_a_ring_of_four_and_rings_of_two() -> None:
    on_ring(4, (checks.loss_is_global, checks.fsdp_of_rings))


# In one process, without a group


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE of (B, H, S, D) as a product of complex numbers."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half).double() / half)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


@pytest.mark.parametrize("documents", [None, (0, 3, 3, 20, 32)])
@pytest.mark.parametrize("theta", [None, 100.0])
def test_it_is_attention(documents: tuple[int, ...] | None, theta: float | None) -> None:
    """Against SDPA with a mask and RoPE written down once more."""
    torch.manual_seed(0)
    module = ringray.ContextParallelAttention(24, 4, num_kv_heads=2, bias=True, rope_theta=theta)
    x = torch.randn(2, 32, 24)
    positions, document = torch.arange(32), torch.zeros(32)
    if documents is not None:
        document = torch.bucketize(positions, torch.tensor(documents), right=True)
        positions = positions - torch.tensor(documents)[document - 1]
    q, k, v = (
        project(x).view(2, 32, -1, 6).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if theta is not None:
        q, k = rotated(q, positions, theta), rotated(k, positions, theta)
    seen = (document[:, None] == document) & torch.ones(32, 32).tril().bool()
    want = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    want = module.o_proj(want.transpose(1, 2).flatten(2))
    cu = None if documents is None else torch.tensor(documents)
    torch.testing.assert_close(module(x, cu_seqlens=cu), want, atol=1e-5, rtol=1e-5)


def test_rope_is_right_at_a_million_tokens() -> None:
    """Two copies of a short text, a million tokens apart, attend alike."""
    from ringray.nn.attention import _rotate, _rotation

    cos, sin = _rotation(("contiguous", 1 << 20, 1 << 16, (1 << 16) - 1), None, 64, 1e4, _cpu())
    x = torch.randn(1, 1, 16, 64)
    want = rotated(x, torch.arange((1 << 20) - 16, 1 << 20), 1e4)
    torch.testing.assert_close(_rotate(x, cos, sin), want, atol=1e-5, rtol=1e-5)


def _cpu() -> torch.device:
    return torch.device("cpu")


def test_low_precision_and_autocast() -> None:
    torch.manual_seed(0)
    module = ringray.ContextParallelAttention(32, 4)
    x = torch.randn(1, 16, 32)
    want = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, atol=3e-2, rtol=3e-2)
    half = module.to(torch.bfloat16)(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), want, atol=3e-2, rtol=3e-2)


def test_masks_and_documents_of_each_batch_row() -> None:
    """Chunks, windows to both sides, prefixes; documents by row, positions of RoPE with them."""
    torch.manual_seed(0)
    x, cuts = torch.randn(2, 14, 16), [[0, 3, 14], [0, 14]]
    module = ringray.ContextParallelAttention(16, 2, chunk=5)
    got = module(x, cu_seqlens=cuts, prefix=4)
    for row, cu in enumerate(cuts):
        want = module(x[row : row + 1], cu_seqlens=cu, prefix=[4])
        torch.testing.assert_close(got[row : row + 1], want)
    assert not torch.allclose(got, module(x, cu_seqlens=cuts))
    traced = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(traced(x, cu_seqlens=torch.tensor([[0, 3, 14], [0, 14, 14]])),
                               module(x, cu_seqlens=cuts))  # fmt: skip
    encoder = ringray.ContextParallelAttention(16, 2, causal=False, window=(2, None))
    shifted = x + torch.nn.functional.one_hot(torch.tensor(5), 14)[:, None]
    same = (encoder(x) == encoder(shifted)).all(-1)[0]
    assert same.tolist() == [False] * 8 + [True] * 6


def test_training_alone_drops_weights() -> None:
    """And draws them anew each time; compiled code does as eager code does."""
    torch.manual_seed(0)
    module, x = ringray.ContextParallelAttention(16, 2, dropout_p=0.5), torch.randn(1, 14, 16)
    twin = ringray.ContextParallelAttention(16, 2)
    twin.load_state_dict(module.state_dict())
    assert "dropout_p=0.5" in repr(module)
    for run in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        module.train()
        torch.manual_seed(1)
        first, second = run(x), run(x)
        torch.manual_seed(1)
        assert torch.equal(run(x), first)
        assert not torch.allclose(first, second)
        assert not torch.allclose(first, twin(x))
        module.eval()
        torch.testing.assert_close(run(x), twin(x))


def test_it_is_an_ordinary_module() -> None:
    module = ringray.ContextParallelAttention(32, 4, num_kv_heads=2, window=5, transport="ring")
    assert {name: tuple(x.shape) for name, x in module.state_dict().items()} == {
        "q_proj.weight": (32, 32), "k_proj.weight": (16, 32),
        "v_proj.weight": (16, 32), "o_proj.weight": (32, 32),
    }  # fmt: skip
    assert "window=5" in repr(module)
    empty = ringray.ContextParallelAttention(32, 4, device="meta", dtype=torch.bfloat16)
    assert empty.q_proj.weight.is_meta
    assert empty.q_proj.weight.dtype == torch.bfloat16
    x = torch.randn(1, 8, 32)
    twin = copy.deepcopy(module)
    twin.q_proj.weight.data.zero_()
    assert not torch.equal(module(x), twin(x))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"hidden_dim": 30}, "hidden_dim: got 30, expected a multiple of num_heads = 4"),
        ({"num_kv_heads": 3}, "num_kv_heads: got 3, expected a divisor of num_heads = 4"),
        ({"head_dim": 7}, "head_dim: got 7, expected an even one for RoPE"),
        ({"window": 3, "causal": False}, "window: got 3 with causal=False"),
        ({"partition": "zigzg"}, "partition: got 'zigzg', .* did you mean 'zigzag'"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ringray.ContextParallelAttention(**{"hidden_dim": 32, "num_heads": 4, **arguments})


def test_labels_are_successors_within_documents() -> None:
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]], dtype=torch.int32)
    assert next_token_labels(ids).tolist() == [[11, 12, 13, 14, 15, -100]]
    with pytest.raises(ValueError, match="cu_seqlens: got 6, expected integers"):
        next_token_labels(ids, 6)  # type: ignore[arg-type]
    for boundaries in ([0, 5], [0, 5.5, 6], [[0, 6]] * 2):
        with pytest.raises(ValueError, match="cu_seqlens: "):
            next_token_labels(ids, boundaries)
    for wrong in (ids.float(), ids[0], None):
        with pytest.raises(ValueError, match=r"input_ids: got .*, expected integers \(B, seq"):
            next_token_labels(wrong)  # type: ignore[arg-type]
    packed = next_token_labels(ids, torch.tensor([0, 0, 2, 2, 5, 6]), ignore_index=-1)
    assert packed.tolist() == [[11, -1, 13, 14, -1, -1]]
