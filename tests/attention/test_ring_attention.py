"""``ring_attention`` on real rings of gloo processes, and in one process without any."""

from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ringray
from ringray.nn import next_token_labels
from ringray_kernels import testing
from tests.support import agreement_checks as refusals
from tests.support import overlap_checks
from tests.support import ring_checks as checks
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring

EVERY = (
    checks.exact, partial(checks.random_rings, seed=1, count=8), checks.documents_of_each_row,
    checks.some_gradients, checks.strides, checks.sharding, refusals.without_agreement,
    checks.scores, checks.uneven_rows, refusals.messages_of_a_user,
    checks.shards_remember_their_length,
)  # fmt: skip
TOGETHER = (  # what one rank alone has not
    checks.only_out_or_only_lse, refusals.order_of_backward, refusals.timeouts_say_where,
    overlap_checks.transfers_run_beside_computation,
)  # fmt: skip


@pytest.mark.parametrize("size", [*exhaustive(1, 2), 3, *exhaustive(4)])
def test_rings(size: int) -> None:
    of_four = [checks.subgroups] if size == 4 else []
    on_ring(size, [*EVERY, *(TOGETHER if size > 1 else ()), *of_four])


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_500_random_rings(size: int) -> None:
    on_ring(size, (partial(checks.random_rings, seed=20261122, count=125),))


# In one process, without a group


def problem(rows: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return testing.make_inputs(2, 4, 2, rows, 16, torch.float32, seed=0)[:3]


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = problem()
    sinks = torch.tensor([9.0, 0.0, -9.0, -torch.inf], requires_grad=True)
    out, lse = ringray.ring_attention(q, k, v, sinks=sinks, return_lse=True)
    assert out[:, 0].abs().max() < 0.1  # almost all is the sink's
    plain, plain_lse = ringray.ring_attention(q, k, v, return_lse=True)
    assert torch.equal(out[:, 3], plain[:, 3])
    assert torch.equal(lse[:, 3], plain_lse[:, 3])
    (dsinks,) = torch.autograd.grad(out.sum(), sinks)
    assert not dsinks.isnan().any()
    assert dsinks[3] == 0


def test_gradients_of_gradients_are_refused() -> None:
    """Not 0, also where dout is a constant; other parts of a graph may have them."""
    q, k, v = (x.requires_grad_() for x in problem())
    for function in (
        ringray.ring_attention,
        torch.compile(ringray.ring_attention, backend="eager"),
    ):
        loss = function(q, k, v).sum()
        (dq,) = torch.autograd.grad(loss, q, create_graph=True)
        torch.testing.assert_close(
            dq, torch.autograd.grad(ringray.ring_attention(q, k, v).sum(), q)[0]
        )
        with pytest.raises(RuntimeError, match=r"gradient of its gradients|no autograd formula"):
            dq.square().sum().backward()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"window": -1}, "window: got -1, expected None or an integer of at least 0"),
        ({"window": 2, "causal": False}, "window: got 2 without causal"),
        ({"prefix": [1, 2]}, r"prefix: got \(1, 2\), .* one for all documents or one for each of"),
        ({"global_tokens": 2}, "global_tokens: got 2 without window and chunk, expected one of"),
        ({"shared_prefix": 2}, "got 2 without window, chunk and cu_seqlens, expected one of"),
        ({"scale": float("nan")}, "scale: got nan, expected None or a finite number"),
        ({"cu_seqlens": np.array(["0", "8"])}, "cu_seqlens: got array.* expected integers in a"),
        ({"scale": torch.tensor(2.0, requires_grad=True)}, "scale: got tensor.*requires_grad"),
        ({"is_causal": True}, "unexpected keyword 'is_causal'; ringray calls it causal"),
        ({"window_size": (3, 0)}, r"ringray calls it window \(w for window_size=\(w, 0\)\)"),
        ({"partitoin": "zigzag"}, "'partitoin'; did you mean 'partition'"),
        ({"cu_seqlens": [[0, 3, 8], [0, 7]]}, "cu_seqlens: expected boundaries from 0 to"),
        ({"dropout_p": 1}, "dropout_p: got 1, expected a number of at least 0 and below 1"),
        ({"dropout_p": 0.1, "dropout_seed": 1 << 62}, "dropout_seed: got 4611686018427387904"),
        ({"sinks": torch.zeros(4).half()}, "sinks: got torch.float16 .* expected .* float32 or q"),
        ({"alibi_slopes": torch.ones(2, 4, 8, 8)}, r"shape \(2, 4, 8, 8\), .* of the distance"),
        ({"alibi_slopes": torch.ones(4).requires_grad_()}, "requires a gradient, expected const"),
        ({"distance_bias": torch.zeros(4, 6)}, r"got .* of shape \(4, 6\) .* \(4, 2 R"),
        ({"distance_bias": torch.full((4, 5), torch.inf)}, "got values that are not finite"),
        (
            {"distance_bias": torch.zeros(4, 5), "alibi_slopes": [0.5] * 4},
            "got alibi_slopes too, expected one bias",
        ),
    ],
)
def test_wrong_arguments_are_told(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ringray.ring_attention(*problem(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("scalar", [np.int64, torch.tensor])
def test_integers_of_numpy_and_torch(scalar: Any) -> None:
    q, k, v = problem(12)
    want = ringray.ring_attention(q, k, v, window=3, seq_len=12, cu_seqlens=[0, 5, 12])
    for cu in ([0, scalar(5), 12], (0, scalar(5), 12), np.array([0, 5, 12], dtype=np.uint16)):
        got = ringray.ring_attention(
            q, k, v, window=scalar(3), seq_len=scalar(12), cu_seqlens=cu, blocks=scalar(4),
            causal=np.True_, scale=np.float32(0.25),
        )  # fmt: skip
        torch.testing.assert_close(got, want)
    sides = {"window": [scalar(3), None], "chunk": scalar(5), "global_tokens": scalar(2)}
    plain = ringray.ring_attention(q, k, v, window=3, chunk=5, global_tokens=2)
    assert torch.equal(ringray.ring_attention(q, k, v, **sides), plain)
    rows = ringray.shard(q, dim=scalar(2))
    assert torch.equal(ringray.unshard(rows, dim=scalar(2), seq_len=scalar(12)), q)
    positions = ringray.local_positions("zigzag", scalar(8), scalar(2), scalar(0))
    assert positions.tolist() == [0, 1, 6, 7]
    positions.zero_()  # a copy
    assert ringray.local_positions("zigzag", 8, 2, 0).tolist() == [0, 1, 6, 7]
    ringray.ContextParallelAttention(scalar(16), scalar(2), window=scalar(3))


@pytest.mark.parametrize(
    "rows",
    [
        [torch.tensor([0, 5, 12]), torch.tensor([0, 3, 7, 12], dtype=torch.int32)],
        (np.array([0, 5, 12]), np.array([0, 3, 7, 12])),
        np.array([[0, 5, 12, 12], [0, 3, 7, 12]]),
    ],
)
def test_rows_of_boundaries_may_be_tensors_and_arrays(rows: Any) -> None:
    q, k, v = problem(12)
    lists = [[0, 5, 12], [0, 3, 7, 12]]
    want = ringray.ring_attention(q, k, v, cu_seqlens=lists)
    traced = torch.compile(ringray.ring_attention, fullgraph=True, backend="eager")
    for function in (ringray.ring_attention, traced):
        assert torch.equal(function(q, k, v, cu_seqlens=rows), want)
    module, x = ringray.ContextParallelAttention(16, 2), torch.randn(2, 12, 16)
    assert torch.equal(module(x, cu_seqlens=rows), module(x, cu_seqlens=lists))
    with ringray.context_parallel(cu_seqlens=rows):
        routed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
    assert torch.equal(routed, want)
    ids = torch.arange(24).view(2, 12)
    assert torch.equal(next_token_labels(ids, rows), next_token_labels(ids, lists))


@pytest.mark.parametrize("compiles", [False, True])
def test_autocast_casts_as_for_sdpa(compiles: bool) -> None:
    q, k, v = (x.requires_grad_() for x in problem(12))
    function = ringray.ring_attention
    if compiles:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    with torch.autocast("cpu", torch.bfloat16):
        out = function(q, k.half(), v.bfloat16())
        want = torch.nn.functional.scaled_dot_product_attention(
            q, k.half(), v.bfloat16(), is_causal=True, enable_gqa=True
        )
    for x in (out, want):
        assert x.dtype == torch.bfloat16
        results.append((x, *torch.autograd.grad(x.float().sum(), (q, k, v))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_sharding_says_what_is_wrong() -> None:
    x = torch.zeros(4, 6)
    for options, says in (
        ({"dim": 2}, "dim: got 2"), ({"dim": 0, "partition": "zag"}, "partition: got 'zag'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            ringray.shard(x, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is empty"):
        ringray.shard(torch.zeros(0, 6), dim=0)
    with pytest.raises(ValueError, match="seq_len: 1 ranks x 6 rows = 6 positions, but "):
        ringray.unshard(x, dim=1, seq_len=7)
    for arguments, says in (
        (("zigzag", 0, 1, 0), "seq_len: got 0"),
        (("zigzag", 8, 0, 0), "world_size: got 0"),
        (("zigzag", 8, 2, 2), "rank: got 2, expected 0 to 1"),
        (("zag", 8, 2, 0), "partition: got 'zag'"),
    ):
        with pytest.raises(ValueError, match=says):
            ringray.local_positions(*arguments)


def test_the_namespace_is_lazy_and_complete() -> None:
    assert set(ringray.__all__) <= set(dir(ringray))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ringray.nothing  # noqa: B018


def test_slopes_are_values_of_a_call() -> None:
    """In a tensor, of which values may change, or a list; zeros are none."""
    q, k, v, _ = testing.make_inputs(2, 4, 2, 62, 16, torch.float32, seed=0)
    slopes = testing.make_slopes(4)
    seen = testing.visible(62, causal=True)
    plain = ringray.ring_attention(q, k, v)
    for factor in (1, 2, 0):
        given = (slopes * factor, (slopes * factor).tolist(), (slopes * factor).half().expand(2, 4))
        want = testing.oracle(q, k, v, None, seen, scale=0.25, slopes=given[0]).out.float()
        for one in given:
            got = ringray.ring_attention(q, k, v, alibi_slopes=one)
            torch.testing.assert_close(got, want)
    torch.testing.assert_close(plain, want)
    slopes.zero_()
    torch.testing.assert_close(ringray.ring_attention(q, k, v, alibi_slopes=slopes), want)


def test_buckets_of_an_embedding_are_learned_through_a_table() -> None:
    """T5: logarithmic buckets of an embedding, whose gradient is that of dense scores."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 40, 16) for _ in range(3))
    embedding = torch.nn.Embedding(8, 4)
    buckets = torch.arange(-12, 13).abs().add(1).log2().round().long()
    rows = torch.arange(40)
    places = (rows - rows[:, None]).clamp(-12, 12) + 12
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=embedding(buckets[places]).permute(2, 0, 1)[None]
    )
    (want,) = torch.autograd.grad(dense.square().sum(), embedding.weight)
    table = embedding(buckets).T
    out = ringray.ring_attention(q, k, v, causal=False, distance_bias=table)
    torch.testing.assert_close(out, dense)
    (got,) = torch.autograd.grad(out.square().sum(), embedding.weight)  # type: ignore[union-attr]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


# Keywords of other libraries, which two pages promise an answer to: those of one in a table, of the
# other in all of them.
PAGES = Path(__file__).parents[2] / "docs"
BOTH = [(PAGES / f"coming-from{end}.md").read_text("utf-8") for end in ("", "-training")]
TABLES = BOTH[0].partition("## Names that differ")[2].partition("\n## ")[0] + BOTH[1]
FIRST = [line.split(" | ")[0] for line in TABLES.splitlines() if line.startswith("| `")]
NAMES = sorted(
    set(re.findall(r"`([a-z_0-9]+)(?:=[^`]*)?`", " ".join(FIRST)))
    - set(inspect.signature(ringray.ring_attention).parameters)
)
assert len(NAMES) > 50


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_pages_is_answered(name: str) -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match=f"unexpected keyword '{name}'; ringray calls it"):
        ringray.ring_attention(q, q, q, **{name: None})  # type: ignore[arg-type]
