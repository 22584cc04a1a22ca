"""Backend triton through the op, the plan and the platform; on CPUs in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import ringray
from ringray.base.errors import SpecError
from ringray.lab.cluster.capacity import Capacity, NodeGroup
from ringray.lab.cluster.fit import Cluster
from ringray.lab.plan import plan
from ringray.lab.specs import model as spec
from ringray_kernels import Blocks
from tests.support import ring_truth
from tests.support.ranks import Case, on_ring

interpreter = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="CPU tensors need Triton's interpreter"
)
OTHER = "dq=16x16/4/1"
SMALL = Blocks.parse("forward=32x16/4/2,dq=16x16/4/1,dkv=16x32/4/1")


# The op


def within_budget(rank: int, size: int) -> None:
    """Masks, dtypes, a head dim of two parts, tiles smaller than a shard."""
    for case in (
        Case("zigzag", backend="triton", cu=(0, 5, 5, 30, 61)),
        Case("zigzag-token", torch.bfloat16, backend="triton", window=9, blocks=SMALL),
        Case("striped", torch.float16, backend="triton", causal=False, blocks=SMALL),
        Case("contiguous", backend="triton", head_dim=80),
    ):
        ring_truth.within_budget(case, rank, size, ring_truth.truth(case))


def blocks_disagree(rank: int, size: int) -> None:
    """Ranks with other blocks, or with another backend's, all learn it."""
    case = Case("zigzag", seq_len=32, backend="triton")
    q, k, v, _ = case.shards()
    other = Blocks.parse(OTHER)
    for mine, says in (
        (SMALL, "blocks: "),
        (other, "blocks: " + (f"{OTHER!r} here" if rank else "None here")),
        (64, "backend 'triton' takes None or a" if rank else "rank(s) 1 were refused"),
    ):
        given: dict[str, Any] = {**case.arguments, "blocks": mine if rank else None}
        with pytest.raises(ValueError, match=r"blocks|refused") as caught:
            ringray.ring_attention(q, k, v, **given)
        assert says in str(caught.value)
    # No configuration at all is the default, said otherwise.
    given = {**case.arguments, "blocks": Blocks() if rank else None}
    ringray.ring_attention(q, k, v, **given)


@pytest.mark.slow
@interpreter
def test_a_ring_of_two() -> None:
    on_ring(2, (within_budget, blocks_disagree))


# The plan


def build(strategy: str, device: str = "cuda", problem: str = "seq_len: 64", rest: str = "") -> Any:
    head = f"version: 1\nname: p\nkind: latency\nring: {{size: 2, device: {device}}}\n"
    text = f"{head}problem: {{{problem}}}\nstrategy:\n  {strategy}\n{rest}"
    return plan.build(spec.parse(text, "p.yaml"))


@pytest.mark.parametrize(
    ("strategy", "device", "line", "field", "says"),
    [
        (
            "blocks: 64\n  backend: triton", "auto", 7, "strategy.blocks",
            "got 64, backend triton takes null or a text such as 'forward=128x64/8/2'",
        ),
        (
            "backend: aten\n  blocks: dq=16x16/4/1", "auto", 8, "strategy.blocks",
            "got dq=16x16/4/1, backend aten takes null or a number of query rows per call",
        ),
        (f"blocks: {OTHER}", "cpu", 7, "strategy.blocks", r"auto \(aten on cpu\) takes null or"),
        (
            "blocks: forward=100x64/8/2", "cuda", 7, "strategy.blocks",
            "forward=100x64/8/2 fits no known GPU: block_m: got 100, expected a power of two",
        ),
    ],
)  # fmt: skip
def test_blocks_that_do_not_go_with_their_backend(
    strategy: str, device: str, line: int, field: str, says: str
) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        build(strategy, device)
    assert (caught.value.line, caught.value.field) == (line, field)


def test_the_interpreter_is_for_small_sizes() -> None:
    lengths = "seq_len: [256, 16k], heads: 2, head_dim: 64"
    made = build("backend: triton", "cpu", lengths, "measure: {warmup: 0, repeats: 1}\n")
    small, large = made.trials
    assert small.pruned is None
    assert large.pruned.field == "problem.seq_len"
    assert "in Triton's interpreter, which is for small sizes" in large.pruned.text
    # The cost model knows the interpreter: orders of magnitude slower than aten. Nothing is run.
    quick = build("backend: aten", "cpu", lengths, "measure: {warmup: 0, repeats: 1}\n").trials[0]
    aten, interpreter = (trial.predicted.time_ms for trial in (quick, small))
    assert interpreter / aten > 100
    assert (
        build("backend: triton", "cuda", lengths).runnable
        == build("backend: triton", "cuda", lengths).trials
    )


def test_a_cluster_decides_what_auto_leaves_open() -> None:
    cpus = Cluster(True, Capacity((NodeGroup("node", {"CPU": 8.0}),)))
    gpus = Cluster(False, Capacity((NodeGroup("node", {"CPU": 8.0, "GPU": 8.0}),)))
    for strategy, problem, on_cpus, on_gpus in (
        ("blocks: 64", "seq_len: 64", None, "backend auto (triton on cuda) takes null or a text"),
        (
            "blocks: dq=16x16/4/1",
            "seq_len: 64",
            "backend auto (aten on cpu) takes null or a num",
            None,
        ),
        ("backend: triton", "seq_len: 16k", "which is for small sizes", None),
        ("backend: triton", "seq_len: 64", None, None),
    ):
        (trial,) = build(strategy, "auto", problem).runnable
        for cluster, says in ((cpus, on_cpus), (gpus, on_gpus)):
            refusal = cluster.refusal(trial.config)
            assert (refusal is None) == (says is None), (strategy, refusal)
            assert says is None or says in str(refusal)
