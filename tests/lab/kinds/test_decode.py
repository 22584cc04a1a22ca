"""Kind decode: what a trial sends, holds and compares with, and the fields that it refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from ringray.base.errors import SpecError
from ringray.lab.kinds import decode
from ringray.lab.kinds.base import RankContext
from ringray.lab.plan import plan
from ringray.lab.plan.trial import Trial
from ringray.lab.specs import model as spec
from ringray.lab.trial import measurement
from tests.support import ranks
from tests.support.point import point

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
    context = RankContext(rank, torch.device("cpu"), dist.group.WORLD if size > 1 else None)
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


def test_a_ring() -> None:
    ranks.on_ring(3, (sends_what_the_plan_says,))


def test_tokens_of_a_step_are_counted() -> None:
    """Rates are of the new tokens, and FLOPs of what these see."""
    (one, five) = trials(1, ", new_tokens: [null, 5]")
    assert (one.config.problem.new_tokens, five.config.problem.new_tokens) == (1, 5)
    assert one.predicted.flops == 4 * 16 * 6 * 301
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
