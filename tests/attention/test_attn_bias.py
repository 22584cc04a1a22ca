"""Biases of pairs of this rank's rows and all keys, with their gradient."""

from __future__ import annotations

import pytest
import torch

import ringray
from ringray_kernels.backends import composed
from tests.support import pair_checks as checks
from tests.support.backend_problems import interpreted
from tests.support.exhaustive import exhaustive
from tests.support.ranks import on_ring


@pytest.fixture(params=["reference", "aten", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "triton" and not interpreted("triton"):
        pytest.skip("tests/kernels/test_gpu_scores.py runs it on a GPU")
    monkeypatch.setattr(composed, "SCORES_AT_ONCE", 1 << 9)
    return str(request.param)


@pytest.mark.parametrize("shape", [*checks.SHAPES[::3], *exhaustive(*checks.SHAPES[1:3])])
def test_one_rank(backend: str, shape: tuple[int, int]) -> None:
    """Within rounding of fp64, bitwise repeatable, whatever hidden pairs hold."""
    number = checks.SHAPES.index(shape)
    asked = checks.ASKED[number : number + 2] if backend == "triton" else checks.ASKED
    inputs, bias = checks.problem(37), checks.make_bias(shape, 37)
    for options in asked:
        seen = checks.seen_by(37, **options)
        hidden = bias.masked_fill(~seen, checks.NAN)
        arguments = {"backend": backend, "partition": "contiguous", **options}
        got = checks.run(inputs, hidden, **arguments)
        checks.close(got, checks.truth(inputs, bias, seen, **options), (backend, shape, options))
        again = checks.run(inputs, hidden.masked_fill(~seen, torch.inf), **arguments)
        assert all(torch.equal(x, again[name]) for name, x in got.items())


def test_minus_infinity_hides_a_pair(backend: str) -> None:
    """In some keys, in all keys of a block, and in all keys of a row, which sees nothing then."""
    *qkv, dout = checks.problem(37)
    bias, seen = checks.make_bias((2, 4), 37), checks.seen_by(37)
    hidden = torch.zeros_like(seen)
    hidden[20:30, :16], hidden[5, 2], hidden[11] = True, True, True
    masked, ways = bias.masked_fill(hidden, -torch.inf), {"partition": "contiguous"}
    got = checks.run([*qkv, dout], masked, backend=backend, **ways)
    assert not got["out"][:, :, 11].any()
    assert not got["dq"][:, :, 11].any()
    # A row that sees nothing takes no part in gradients; in fp64 it sees itself, for nothing.
    others = dout.clone()
    others[:, :, 11] = 0
    alone = torch.eye(37, dtype=torch.bool) & hidden
    want = checks.truth([*qkv, others], bias, seen & ~hidden | alone)
    got["out"], want["out"] = (x["out"].detach().clone() for x in (got, want))
    got["out"][:, :, 11] = want["out"][:, :, 11]
    checks.close(got, want, backend)


@pytest.mark.parametrize("size", [2, 3, *exhaustive(4)])
def test_rings(size: int) -> None:
    on_ring(size, [checks.pairs, *([checks.compiled] if size == 2 else [])])


def test_16_bits_under_autocast() -> None:
    inputs, bias = checks.problem(38), checks.make_bias((1, 4), 38)
    with torch.autocast("cpu", torch.bfloat16):
        got = checks.run([*inputs[:3], inputs[3].bfloat16()], bias)
    assert (got["out"].dtype, got["dbias"].dtype) == (torch.bfloat16, torch.float32)
    want = checks.truth(inputs, bias, checks.seen_by(38))
    for name in ("out", "dbias"):
        error = float((got[name].detach().double() - want[name]).norm() / want[name].norm())
        assert error < 2e-2, name
    half = checks.run([x.bfloat16() for x in inputs], bias.bfloat16())
    assert half["dbias"].dtype == torch.bfloat16


def test_biases_that_are_refused() -> None:
    q, k, v, _ = checks.problem(8)
    for wrong, says in (
        (torch.zeros(1, 4, 8, 9), r"expected None or a tensor \(2 or 1, 4 or 1, 8, 8\)"),
        (torch.zeros(1, 4, 8, 8).double(), "got torch.float64"),
        (torch.zeros(1, 4, 8, 8).to_sparse(), "layout torch.sparse"),
        (0.5, "got float"),
    ):
        with pytest.raises(ValueError, match=f"attn_bias: .*{says}"):
            ringray.ring_attention(q, k, v, attn_bias=wrong)  # type: ignore[arg-type]
    bias = torch.zeros(1, 1, 8, 8)
    with pytest.raises(ValueError, match="attn_bias: got alibi_slopes too"):
        ringray.ring_attention(q, k, v, attn_bias=bias, alibi_slopes=[0.5] * 4)
    for options, says in (
        ({"backend": "cudnn"}, "backend 'cudnn': "),
        ({"transport": "auto"}, "attn_bias: got transport 'auto'"),
        ({"backward": "query-side"}, "attn_bias: got backward 'query-side', .* auto, planned or"),
    ):
        with pytest.raises(ValueError, match=says):
            ringray.ring_attention(q, k, v, attn_bias=bias, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unexpected keyword 'attn_bias'; .* decode in one"):
        ringray.ring_decode(q, None, attn_bias=bias)  # type: ignore[arg-type, call-arg]
