"""Baselines: right, refused where they cannot run, timed on their ranks; and kind decode."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ringray
from ringray.base.errors import SpecError, UserError
from ringray.lab.kinds import decode, latency
from ringray.lab.kinds.base import RankContext, visible
from ringray.lab.kinds.baselines import BASELINES
from ringray.lab.plan import plan
from ringray.lab.plan.trial import Trial
from ringray.lab.specs import model as spec
from ringray.lab.trial import measurement
from tests.support.point import point
from tests.support.ranks import on_ring

MASKS: tuple[dict[str, Any], ...] = (
    {}, {"causal": False}, {"window": 9}, {"documents": (64, 100, 37)},
    {"window": 9, "documents": (64, 100, 37)},
)  # fmt: skip
CPU = torch.device("cpu")


def exact(config: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = config.problem.heads // config.problem.kv_heads
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * config.problem.head_dim**-0.5
    return scores.masked_fill(~visible(config.problem, CPU), -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(
    "name",
    [  # those that compile take their time
        pytest.param(name, marks=[pytest.mark.exhaustive] * (name == "flex"))
        for name, kind in BASELINES.items()
        if not kind.on_ring
    ],
)
def test_one_process_computes_the_whole_problem(name: str, mask: dict[str, Any]) -> None:
    config = point(
        seq_len=201, heads=4, kv_heads=2, head_dim=16, direction="forward", baseline=name, **mask
    )
    kind = BASELINES[name]
    assert kind.unsupported(config, "cpu") is None
    context = RankContext(0, CPU, None)
    q, k, v, _ = latency._inputs(config, config.problem.seq_len, context, 0)
    attend = importlib.import_module(kind.module).prepare(config, context, q, k, v)
    with torch.no_grad():
        out = attend()
    torch.testing.assert_close(out.double(), exact(config, q, k, v), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "device", "changed", "says"),
    [
        ("flex", "cpu", {}, "no gradients on cpu, got forward+backward"),
        ("context-parallel", "cpu", {"dtype": "bfloat16"}, "runs on cuda only, got cpu"),
        ("context-parallel", "cuda", {}, "elements of 16 bits, got float32"),
        ("context-parallel", "auto", {"dtype": "float16", "window": 3}, "without any other"),
        ("ring-flash-attn", "cuda", {"dtype": "float16", "causal": False}, "takes causal: true"),
        ("ring-flash-attn", "cuda", {"dtype": "float16", "ring_size": 1}, "got a ring of 1"),
    ],
)
def test_what_a_baseline_cannot_compute(
    name: str, device: str, changed: dict[str, Any], says: str
) -> None:
    config = point(**{"ring_size": 2, "baseline": name, **changed})
    reason = BASELINES[name].unsupported(config, device)
    assert says in reason


def test_a_spec_with_such_a_baseline_is_refused() -> None:
    text = (
        "version: 1\nname: a\nkind: latency\nring: {size: 2, device: cpu}\n"
        "problem: {seq_len: 64}\nmeasure: {baseline: context-parallel}\n"
    )
    with pytest.raises(SpecError, match=r"measure\.baseline: .*runs on cuda only, got cpu"):
        plan.build(spec.parse(text))


def shards_of_every_rank(rank: int, size: int) -> None:
    """A package on the ring gets the zigzag shard of every rank, rows first, and its group."""
    calls = []

    def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: Any) -> Tensor:
        calls.append([tuple(x.shape) for x in (q, k, v) if x.is_contiguous()])
        found = ringray.ring_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), causal=causal, group=group
        )
        assert isinstance(found, Tensor)
        return found.transpose(1, 2)

    package = ModuleType("ring_flash_attn")
    package.zigzag_ring_flash_attn_func = attend  # type: ignore[attr-defined]
    config = point(
        ring_size=size, seq_len=61, heads=4, kv_heads=2, head_dim=8, repeats=3,
        baseline="ring-flash-attn",
    )  # fmt: skip
    assert dist.group.WORLD is not None
    context = RankContext(rank, CPU, dist.group.WORLD, dist.group.WORLD)
    with pytest.raises(UserError, match="expected the packages ring-flash-attn and flash-attn"):
        latency.run(config, context)
    sys.modules["ring_flash_attn"] = package
    try:
        report = latency.run(config, context)
    finally:
        del sys.modules["ring_flash_attn"]
    assert len(report.baseline_seconds) == 3
    rows = -(-61 // (2 * size)) * 2
    assert calls == [[(1, rows, 4, 8), (1, rows, 2, 8), (1, rows, 2, 8)]] * 4


def sdpa_within_the_block_only(rank: int, size: int) -> None:
    """PyTorch's context_parallel replaces SDPA, and puts it back."""
    from ringray.lab.kinds.baselines import context_parallel

    before = F.scaled_dot_product_attention
    context = RankContext(rank, CPU, dist.group.WORLD)
    config = point(ring_size=size, baseline="context-parallel", dtype="bfloat16")
    with context_parallel.around(config, context, 32):
        assert F.scaled_dot_product_attention is not before
    assert F.scaled_dot_product_attention is before


@pytest.mark.slow
def test_on_a_ring() -> None:
    on_ring(2, (shards_of_every_rank, sdpa_within_the_block_only))


# Kind decode: what a trial sends, holds and compares with, and the fields that it refuses

HEAD = "version: 1\nname: d\nkind: {kind}\nring: {{size: {size}, device: cpu}}\n"
PROBLEM = (
    "problem: {{seq_len: 301, heads: 6, kv_heads: 2, head_dim: 16, dtype: float32, "
    "direction: forward{more}}}\nmeasure: {{warmup: 2, repeats: 3, baseline: {baseline}}}\n"
)


def trials(
    size: int | list[int] = 2, more: str = "", kind: str = "decode", baseline: str = "null",
    strategy: str = "",
) -> tuple[Trial, ...]:  # fmt: skip
    text = HEAD.format(kind=kind, size=size) + PROBLEM.format(more=more, baseline=baseline)
    return plan.build(spec.parse(text + strategy)).trials


def sends_what_the_plan_says(rank: int, size: int) -> None:
    """To the byte and the message, for one token and more; other ranks hold what is predicted."""
    context = RankContext(rank, CPU, dist.group.WORLD if size > 1 else None)
    strategy = "strategy: {partition: [zigzag, striped]}\n"
    made = (
        *trials(size, ", new_tokens: [1, 5], window: [null, 40]", "decode", "sdpa", strategy),
        *trials(size, ", window: 40, global_tokens: 7", "decode", "sdpa", strategy),
    )
    assert len(made) == 10
    for trial in made:
        report = decode.run(trial.config, context)
        assert len(report.seconds) == 3
        assert len(report.baseline_seconds) == (0 if rank else 3)
        (sent,) = report.values["sent_bytes"]
        everywhere = torch.tensor([int(sent), report.messages])
        dist.all_reduce(everywhere)
        predicted = [trial.predicted.sent_bytes, trial.predicted.messages]
        assert everywhere.tolist() == predicted, trial.config
        (held,) = report.values["peak_memory_bytes"]
        assert held == pytest.approx(trial.predicted.peak_memory_bytes, rel=0.25)


def test_decoding_on_a_ring() -> None:
    on_ring(3, (sends_what_the_plan_says,))


def test_tokens_of_a_step_are_counted() -> None:
    """Rates are of the new tokens, and FLOPs of what these see."""
    (single, five) = trials(1, ", new_tokens: [null, 5]")
    assert (single.config.problem.new_tokens, five.config.problem.new_tokens) == (1, 5)
    assert single.predicted.flops == 4 * 16 * 6 * 301
    assert five.predicted.flops == 4 * 16 * 6 * (301 + 300 + 299 + 298 + 297)
    report = measurement.RankReport(0, seconds=[0.5])
    rate = partial(measurement.summarise, flops=1, reports=[report])
    metrics, _ = rate(five.config)
    assert metrics["tokens_per_s"] == 10
    metrics, _ = rate(point(seq_len=64))
    assert metrics["tokens_per_s"] == 128


@pytest.mark.parametrize(
    ("more", "strategy", "says"),
    [
        (", causal: false", "", "problem.causal: got false, expected true"),
        (", window: {left: 3, right: 3}", "", "problem.window: got [3, 3]"),
        (", new_tokens: 301", "", "problem.new_tokens: got 301, expected fewer than seq_len 301"),
        ("", "strategy: {transport: staged}\n", "strategy.transport: got staged, expected ring"),
    ],
)
def test_what_a_step_does_not_compute_is_refused(more: str, strategy: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        trials(2, more, strategy=strategy)
    assert says in str(caught.value)


def test_a_backward_pass_and_new_tokens_elsewhere_are_refused() -> None:
    text = HEAD.format(kind="decode", size=2) + "problem: {seq_len: 301, heads: 6}\n"
    with pytest.raises(SpecError, match=r"direction: got forward\+backward, expected forward"):
        plan.build(spec.parse(text))
    with pytest.raises(SpecError, match="new_tokens: got 2, but kind latency computes whole seq"):
        trials(2, ", new_tokens: 2", "latency")
