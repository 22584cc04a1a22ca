"""Compiled code on real rings, and what one process can see of the operators behind it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.compiled_autograd
from torch.library import opcheck

import ringray
from ringray.attention.call import DEFAULTS
from ringray.attention.deal import spoken
from ringray.attention.tensor_arguments import TensorArguments
from ringray_kernels import testing
from tests.support import compile_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring

COMPILER = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


CHECKS = (
    checks.modes, checks.whole_steps, checks.ddp, checks.fsdp, checks.huggingface, checks.models,
    checks.deals,
)  # fmt: skip


@pytest.mark.slow
def test_a_ring_of_two() -> None:
    on_ring(2, (checks.transports, *CHECKS))


@pytest.mark.exhaustive
def test_larger_rings() -> None:
    on_ring(4, (partial(checks.transports, every=True), *CHECKS))


# In one process, without a group


def problem(rows: int = 8, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return testing.make_inputs(2, 4, 2, rows, 16, dtype, seed=0)


def test_it_is_one_graph_of_one_operator() -> None:
    q, k, v, _ = problem()
    explained = torch._dynamo.explain(ringray.ring_attention)(q, k, v)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    calls = [node for node in explained.graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("ringray.attention" in str(node.target) for node in calls) == 1
    assert len(calls) <= 4  # and what takes its results apart


@pytest.mark.parametrize(
    "arguments",
    [
        {"cu_seqlens": torch.tensor([0, 3, 8]), "backward": "reverse"},
        {"window": [2], "blocks": 4, "scale": 0.3, "sinks": torch.randn(4), "softcap": 3.0},
        {"alibi_slopes": torch.rand(4), "dropout_p": 0.5, "seed": torch.tensor(3)},
        {"distance_bias": torch.rand(4, 7), "partition": "striped", "transport": "allgather"},
        *exhaustive(
            {}, {"attn_bias": torch.rand(2, 1, 8, 8)}, {"chunk": 3, "global_tokens": 2},
            {"causal": False, "window": [-1, 3], "chunk": 5}, {"prefix": [3]},
        ),
    ],
)  # fmt: skip
def test_the_operator_is_well_formed(arguments: dict[str, Any]) -> None:
    q, k, v, dout = problem()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    values = dict(arguments)
    tensors = [values.pop(name, None) for name in (*TensorArguments._fields, "seed")]
    settings = [values.pop(name, default) for name, default in DEFAULTS.items()]
    assert not values
    ring = (None, 1)
    op = torch.ops.ringray.attention.default
    forward = (q, k, v, True, None, *tensors, *ring, *settings, None)
    opcheck(op, forward)
    out, lse, call, kept = op(*forward)
    saved = [x.detach() for x in (q, k, v, out, lse, *kept)]
    for dlse in (None, torch.randn(lse.shape)):
        opcheck(
            torch.ops.ringray.attention_backward.default,
            (dout, dlse, saved, call, *tensors, *ring, *settings, None),
        )


def test_the_other_operators_are_well_formed() -> None:
    x, rule = torch.randn(2, 7, 3, requires_grad=True), ("zigzag", None)
    ops = torch.ops.ringray
    opcheck(ops.unshard.default, (ringray.shard(x, dim=1), 1, *rule, None, 1, 7, "sum", True))
    call = torch.tensor(0)
    opcheck(ops.unshard_backward.default, (torch.randn(2, 7, 3), call, 1, *rule, None, 1, True))
    place = (2, 1, *rule, None, 1, 7, torch.tensor([0, 3, 7]))
    ringray.shift(x, 2, dim=1, partition="contiguous")  # its import registers the operators
    for of_call in (None, call):
        opcheck(ops.shift.default, (ringray.shard(x, dim=1), of_call, True, 1.0, *place))
    opcheck(ops.positions.default, ("striped", None, 8, 2, 1))
    dealt = spoken(ringray.deal(8, 2, cu_seqlens=[0, 3, 8]))
    opcheck(ops.positions.default, (*dealt, 8, 2, 1))
    opcheck(ops.on_host.default, (torch.tensor([0, 3, 8]),))
    own = torch.tensor(3.0, requires_grad=True)
    labels = torch.ones(2, dtype=torch.int64)
    asked = (None, 1, "sharded_cross_entropy", 4, "torch.float32", -100, "sum")
    opcheck(ops.global_mean.default, (own, torch.tensor(4), labels, *asked))
    rows = torch.randn(2, 3, requires_grad=True)
    opcheck(
        ops.of_vocabulary.default,
        (rows, labels, torch.tensor(4), 1, None, 1, 0, "token_log_probs", 1.0, -100),
    )
    cpu = torch.device("cpu")
    opcheck(ops.rotation.default, (torch.tensor([0, 3, 7]), *rule, 8, 1, 0, 7, 16, 1e4, cpu))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"partition": "zigzg"}, "partition: got 'zigzg', .* did you mean 'zigzag'"),
        ({"window": 2.0}, "window: got 2.0"),
        ({"prefix": [3, 4]}, r"prefix: got \(3, 4\), expected .* one for each of 1"),
        ({"blocks": ringray.Blocks()}, r"blocks: got Blocks\(.*backend 'aten' takes None or query"),
        ({"dropout_p": 0.1, "dropout_seed": -1}, "dropout_seed: got -1, expected None or"),
        ({"alibi_slopes": [0.5, 1.0]}, r"alibi_slopes: got shape \(2,\), expected \(4,\)"),
        ({"seq_len": 9}, "seq_len: 1 ranks x 8 rows = 8 positions, but .* deals 9 tokens as 10"),
        ({"cu_seqlens": [0, 8.0]}, r"cu_seqlens: got \[0, 8.0\], expected integers in a tensor or"),
    ],
)
def test_wrong_arguments_are_told_when_it_runs(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        checks.compiled(ringray.ring_attention)(*problem()[:3], **changes)


def test_names_lists_and_scalars_of_others() -> None:
    q, k, v, _ = problem()
    function = checks.compiled(ringray.ring_attention)
    want = ringray.ring_attention(q, k, v, window=2, cu_seqlens=torch.tensor([0, 3, 8]))
    assert torch.equal(function(q, k, v, window=2, cu_seqlens=[0, 3, 8]), want)
    for mask in (
        {"window": (2, None), "causal": False}, {"chunk": 3, "prefix": [2]},
        {"chunk": 3, "global_tokens": 2, "causal": False},
    ):  # fmt: skip
        assert torch.equal(function(q, k, v, **mask), ringray.ring_attention(q, k, v, **mask))
    rows = [[0, 3, 8], [0, 8]]
    want = ringray.ring_attention(q, k, v, cu_seqlens=rows)
    assert torch.equal(function(q, k, v, cu_seqlens=rows), want)
    with pytest.raises(Exception, match="ringray calls it causal"):
        function(q, k, v, is_causal=True)


def test_blocks_are_seen() -> None:
    """Other blocks, another graph."""
    q, k, v, _ = problem(64)
    function = checks.compiled(ringray.ring_attention)
    for blocks in (None, 8, 16):
        assert torch.equal(
            function(q, k, v, blocks=blocks), ringray.ring_attention(q, k, v, blocks=blocks)
        )
    first, second = ringray.Blocks(), ringray.Blocks.parse("dq=16x16/4/1")
    for chosen in (first, second, first):
        with pytest.raises(ValueError, match=re.escape(f"dq={chosen.dq!r}")):
            function(q, k, v, blocks=chosen)


def test_a_graph_of_another_ring_is_refused() -> None:
    q, k, v, _ = problem()
    rest = (*[None] * len(TensorArguments._fields), None, None, 2, *DEFAULTS.values(), None)
    with pytest.raises(ValueError, match="group: compiled for a ring of 2, but it now has 1"):
        torch.ops.ringray.attention(q, k, v, False, None, *rest)


def test_lengths_and_documents_are_data() -> None:
    """Two lengths, two numbers of documents: the third of each compiles nothing."""
    torch.manual_seed(0)
    module = ringray.ContextParallelAttention(32, 4, num_kv_heads=2)

    def run(x: torch.Tensor, seq_len: int, cu: torch.Tensor) -> torch.Tensor:
        rows = ringray.shard(x, dim=1)
        turned = rows + ringray.local_positions("zigzag", seq_len, 1, 0)[:, None]
        return ringray.unshard(
            module(turned, seq_len=seq_len, cu_seqlens=cu), dim=1, seq_len=seq_len
        )

    function, graphs = checks.compiled(run), []
    for seq_len, cuts in ((9, ()), (13, (3,)), (17, (2, 9)), (21, (2, 9, 20)), (31, (1, 2, 3, 4))):
        cu = torch.tensor([0, *cuts, seq_len])
        x = torch.randn(2, seq_len, 32)
        assert torch.equal(function(x, seq_len, cu), run(x, seq_len, cu))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[-2]


def test_calls_of_sdpa_are_routed() -> None:
    q, k, v = (x[:, :2] for x in problem()[:3])

    def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    function = checks.compiled(attends)
    plain = function(q, k, v)
    with ringray.context_parallel(window=2):
        routed = function(q, k, v)
    assert torch.equal(routed, ringray.ring_attention(q, k, v, window=2))
    assert torch.equal(plain, function(q, k, v))
    assert not torch.allclose(plain, routed)


def test_importing_it_imports_no_compiler() -> None:
    """Which takes longer than everything else together."""
    said = "import sys, ringray.nn; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", said], check=True)


def test_compiled_autograd_leaves_an_eager_call_alone(recwarn: pytest.WarningsRecorder) -> None:
    q, k, v, dout = (x.requires_grad_() for x in problem())
    (want,) = torch.autograd.grad(ringray.ring_attention(q, k, v), q, dout)
    out = ringray.ring_attention(q, k, v)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward(dout.detach())
    assert torch.equal(q.grad, want)
    assert not [str(one.message) for one in recwarn if "lru_cache" in str(one.message)]


def test_autocast_does_not_reach_the_reference_backend() -> None:
    results = []
    for enabled in (False, True):
        q, k, v, dout = (x.clone() for x in problem(64, torch.bfloat16))
        q.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = checks.compiled(ringray.ring_attention)(q, k, v, backend="reference")
            out.backward(dout)
        results.append((out, q.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    torch.manual_seed(0)
    module = ringray.ContextParallelAttention(32, 4, num_kv_heads=2)
    found = []
    for function in (module, torch.compile(module, fullgraph=True)):
        x = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
        out = function(x, cu_seqlens=torch.tensor([0, 5, 16]))
        out.square().sum().backward()
        found.append((out, x.grad))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)
