"""The cost model against what it models: constants it mirrors, and measured memory."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ringray
from ringray.base import provenance
from ringray.lab.predict import calibration, cost_model, hardware
from ringray.lab.predict import peak_memory as memory
from ringray.lab.trial.measurement import peak_memory
from ringray.partition import PARTITIONS
from ringray.transport import TRANSPORTS
from ringray_kernels.backends import aten
from tests.support.point import point

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_it_mirrors_the_backend() -> None:
    assert memory.CALL_ELEMENTS == aten.ELEMENTS_PER_CALL


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


def test_ranks_of_other_nodes_take_no_cores() -> None:
    config = point(seq_len=1 << 20, new_tokens=4, ring_size=8, direction="forward")
    here = hardware.cpu(1)
    apart = replace(here, nodes=8, per_node=1)
    assert cost_model.predict(config, apart).time_ms < cost_model.predict(config, here).time_ms / 4


def sizes_of(rng: random.Random) -> dict[str, int]:
    heads = rng.choice([4, 8])
    return {
        "seq_len": rng.choice([rng.randint(1, 40), rng.randint(41, 5000), 1 << 30]),
        "batch": rng.choice([1, 3, 4000]),
        "heads": heads * rng.choice([1, 2]),
        "kv_heads": heads,
    }


MASKS: list[dict[str, Any]] = [
    {"causal": True}, {"causal": False}, {"causal": True, "window": 40},
    {"causal": True, "chunk": 1 << 31}, {"causal": True, "prefix": 7},
    {"causal": True, "chunk": 1 << 31, "global_tokens": 3},
    {"causal": True, "chunk": 1 << 31, "shared_prefix": 3},
]  # fmt: skip
FLEETS = {
    "nodes": "h100:3x2", "shared network ports": "a100:2x4", "one node": "h100:8",
}  # fmt: skip


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("name", [*TRANSPORTS, "hybrid:2", "double-ring:3"])
def test_points_predicted_together_cost_what_each_does(name: str, partition: str) -> None:
    """Lengths, batches and heads that differ, to the last digit of counts that exceed 64 bits."""
    rng = random.Random(f"{name} {partition}")
    mask, direction, dtype = (
        rng.choice(values)
        for values in (MASKS, ("forward", "forward+backward"), ("float32", "bfloat16"))
    )
    fixed = {
        "ring_size": 4 if name in ("ulysses", "hybrid:2") else 6, "transport": name,
        "partition": partition, "direction": direction, "dtype": dtype,
        "order": rng.choice(["topology", "shuffled"]), **mask,
    }  # fmt: skip
    for on in [calibration.fleet(text) for text in FLEETS.values()] + [hardware.cpu(2)]:
        on = replace(on, noise=hardware.Noise(jitter=0.1, slow={1: 2.0}, seed=3))
        for backward in ("planned", "query-side") if direction != "forward" else ("auto",):
            fixed["backward"] = backward if name not in ("allgather", "ulysses") else "auto"
            configs = [point(**fixed, **sizes_of(rng)) for _ in range(10)]
            configs += [configs[0].changed(dtype="float16"), configs[0].changed(head_dim=32)]
            together = cost_model.batches(configs)
            assert sorted(i for some in together for i in some) == list(range(12))
            assert len(together) <= 6  # by dtype, head dim, K/V heads or areas of the mask
            for some in together:
                found = cost_model.predict_batch([configs[i] for i in some], on)
                for i, cost in zip(some, found, strict=True):
                    alone = cost_model.predict(configs[i], on)
                    assert all(
                        a == (b if isinstance(b, int) else pytest.approx(b))
                        for a, b in zip(cost, alone, strict=True)
                    ), (cost, alone)
