"""The cost model against what it models: constants it mirrors, and measured memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import ringray
from ringray.base import provenance
from ringray.lab.predict import cost_model, hardware
from ringray.lab.trial.measurement import peak_memory
from tests.support.point import point

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Each thread of a fused call has scratch memory of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_one_rank_is_near_its_prediction(
    dtype: str, kv_heads: int, backward: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(1, heads, 2048, 64) for heads in (8, kv_heads, kv_heads, 8)]
    *inputs, dout = (torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes)
    leaves = [x.requires_grad_(backward) for x in inputs]

    def work() -> None:
        out = ringray.ring_attention(*leaves)
        if backward:
            assert isinstance(out, torch.Tensor)
            torch.autograd.grad(out, leaves, dout)

    live = sum(x.numel() * x.element_size() for x in [*leaves, *([dout] if backward else [])])
    measured = live + peak_memory(work, torch.device("cpu"))
    direction = "forward+backward" if backward else "forward"
    config = point(seq_len=2048, kv_heads=kv_heads, dtype=dtype, direction=direction)
    cost = cost_model.predict(config, hardware.cpu(1, **provenance.bf16_products()))
    assert cost.peak_memory_bytes == pytest.approx(measured, rel=0.1)


def test_the_baseline_of_decoding_is_one_step() -> None:
    """Not the attention of all tokens to each other."""
    config = point(seq_len=1 << 20, new_tokens=4, ring_size=8, direction="forward", baseline="sdpa")
    on = hardware.cpu(8)
    alone = cost_model.alone_s(config, on)
    bytes_read = (1 << 20) * 2 * 8 * 64 * 4
    assert alone == pytest.approx(bytes_read / on.hardware.memory_bandwidth, rel=1.0)


def test_counts_beyond_64_bits_are_exact() -> None:
    config = point(
        ring_size=4, seq_len=1 << 30, batch=1 << 15, heads=64, kv_heads=64, head_dim=256,
        dtype="float32", causal=False, direction="forward",
    )  # fmt: skip
    sent = 3 * (1 << 30) * (1 << 15) * 64 * 2 * 256 * 4
    assert sent > 1 << 63
    assert cost_model.predict(config, hardware.cpu(2)).sent_bytes == sent
