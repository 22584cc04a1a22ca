"""q, k and v in 8 bits: the numbers, every backend, and every transport on real rings."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from torch import Tensor
from triton.runtime import interpreter

import ringray
from ringray.comm.batch import METER
from ringray.partition import PARTITIONS
from ringray_kernels import testing
from ringray_kernels.api import Features, backward, forward, load_backend
from ringray_kernels.backends import BACKENDS
from ringray_kernels.config import Blocks, head_dim_parts
from ringray_kernels.quantize import DTYPE, dequantized, quantized
from tests.contracts.test_transports import HEADS, names, planned
from tests.support.backend_problems import NAN, Problem, interpreted
from tests.support.exhaustive import exhaustive
from tests.support.ranks import Case, on_ring


def uneven(*tensors: Tensor) -> list[Tensor]:
    """Rows of sizes that no common scale serves: by powers of two from 1 / 4096 to 8."""
    steps = [torch.arange(x.shape[2]) % 16 - 12 for x in tensors]
    return [(x * 2.0 ** step[:, None]).to(x.dtype) for x, step in zip(tensors, steps, strict=True)]


def wide(*tensors: Tensor) -> list[Tensor]:
    return [dequantized(*quantized(x)) for x in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_keep_their_precision_whatever_their_size(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 40, 24, generator=torch.Generator().manual_seed(0))
    (x,) = uneven(x.to(dtype))
    x[0, 0, 0] = 0
    x[0, 0, 1] = torch.finfo(dtype).max / 2  # rounded up it may pass the end
    bits, scale = quantized(x)
    assert (bits.dtype, bits.shape, scale.dtype) == (torch.uint8, x.shape, torch.float32)
    assert scale[0, 0, 0] == 1
    assert (scale.frexp().mantissa == 0.5).all(), "powers of two"
    back = dequantized(bits, scale)
    largest = x.float().abs().amax(-1, keepdim=True)
    # Half a unit of three bits behind the first; or of the least number that e4m3 holds.
    assert ((back - x.float()).abs() <= x.float().abs() / 16 + largest * 2.0**-17).all()
    assert torch.equal(back.float(), bits.view(DTYPE).float() * scale[..., None]), "exact in bf16"


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    asked = Features(quantized=True)
    reason = load_backend(request.param).unsupported(torch.zeros(1, 1, 1, 16), asked)
    if reason:
        pytest.skip(reason)
    return str(request.param)


def attend(backend: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """out of two hops over interleaved keys; hidden keys hold anything."""
    (q8, of_q), *others = (quantized(x) for x in (q, k, v))
    state, everyone = None, torch.arange(problem.rows)
    for part in (everyone[::2], everyone[1::2]):
        start, end = problem.intervals(part)
        (k8, of_k), (v8, of_v) = ((x[:, :, part], scale[:, :, part]) for x, scale in others)
        state = forward(
            q8.view(DTYPE), k8.view(DTYPE), v8.view(DTYPE), start, end, scale=problem.scale,
            softcap=problem.softcap, scales=(of_q, of_k, of_v), state=state,
            blocks=problem.blocks, backend=backend,
        )  # fmt: skip
    return state.out


TRIED: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False, "head_dim": 64, "heads": 4, "kv_heads": 2},
    "window": {"window": 9, "head_dim": 24, "batch": 2},
    "documents": {"cu": (0, 1, 33, 61), "head_dim": 80, "value_dim": 48},
    "no scale": {"factor": 0.0},
    "negative scale and soft cap": {"softcap": 0.5, "factor": -0.3},
}


@pytest.mark.parametrize(
    "tried", ["full", "documents", "negative scale and soft cap", *exhaustive(*TRIED)]
)
def test_attention_in_8_bits(backend: str, tried: str) -> None:
    """Of what the bits say it is exact, but for the rounding of weights in products of 8 bits."""
    tiles = Blocks.parse("forward=32x32/4/2"), Blocks.parse("forward=64x64/4/2/descriptors")
    for dtype, blocks in itertools.product(
        (torch.float32, torch.bfloat16), tiles if interpreted(backend) else (None,)
    ):
        problem = Problem(dtype=dtype, blocks=blocks, **TRIED[tried])
        if blocks is tiles[1] and (head_dim_parts(problem.head_dim, 1)[1] or problem.head_dim % 16):
            continue
        q, k, v, dout = problem.inputs
        q, (k, v) = q * 3, uneven(k, v)
        sign = -1 if problem.scale < 0 else 1
        more: dict[str, Any] = {"softcap": problem.softcap, "scale": max(abs(problem.scale), 1e-30)}
        given = (sign * wide(q)[0], *wide(k, v), None, problem.seen)
        want = testing.oracle(*given, **more).out
        fp8 = backend == "triton"
        yard = testing.yardstick(*given, causal=problem.causal, fp8=fp8, **more).out
        got = attend(backend, problem, q, k, v)
        share = testing.budget_share(got, want, yard, dout)
        assert share <= 1, f"{problem}: out takes {share:.3f} of its budget"


@pytest.mark.parametrize("blocks", ["forward=32x32/4/2", "forward=64x64/4/2/descriptors"])
@pytest.mark.parametrize("gap", [*exhaustive(0), 15])
def test_tiles_hide_rows_whose_bits_are_nan(
    monkeypatch: pytest.MonkeyPatch, gap: int, blocks: str
) -> None:
    """Before, between and after the seen keys; with 8 bits that mean NaN, as on a GPU."""
    if not interpreted("triton"):
        pytest.skip("needs Triton's interpreter")
    convert = interpreter._convert_float

    def converted(given: Any, dtype: Any, to: Any, rounding: Any) -> Any:
        """Triton's interpreter takes the NaN of e4m3 for a number."""
        found = convert(given, dtype, to, rounding)
        if dtype == triton.language.float8e4nv:
            found[(given.view("uint8") & 0x7F) == 0x7F] = 0x7E00
        return found

    monkeypatch.setattr(interpreter, "_convert_float", converted)
    problem = Problem(heads=4, kv_heads=2, head_dim=32)
    q, k, v, _ = problem.inputs
    first, last = (torch.full((1, 61), at, dtype=torch.int32) for at in (7, 20))
    first[:, 30:], last[:, 30:] = 20 + gap, 50
    hidden = torch.ones(61, dtype=torch.bool)
    hidden[7:20] = hidden[20 + gap : 50] = False
    found = []
    for poison in (0.0, NAN):
        for x in (k, v):
            x[:, :, hidden] = poison
        given, scales = zip(*map(quantized, (q, k, v)), strict=True)
        assert (given[2][:, :, hidden] & 0x7F).unique().tolist() == [127 if poison else 0]
        found.append(
            forward(
                *given, first, last, scale=problem.scale, scales=scales, backend="triton",
                blocks=Blocks.parse(blocks),
            )
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not any(x.isnan().any() for x in found[0])


def test_hidden_rows_may_hold_anything(backend: str) -> None:
    problem = Problem(batch=2, heads=4, kv_heads=2)
    q, k, v, _ = problem.inputs
    start, end = (x.clone() for x in problem.intervals(torch.arange(61)))
    start, end = start.clamp(min=7, max=50), end.clamp(min=7, max=50)
    end[:, 20:] = torch.maximum(end[:, 20:], start[:, 20:])
    found = []
    for poison in (0.0, NAN, float("inf"), 3e38):
        for x in (k, v):
            x[:, :, :7] = poison
            x[:, :, 50:] = poison
        q[:, :, :7] = poison  # rows that see nothing
        given, scales = zip(*map(quantized, (q, k, v)), strict=True)
        found.append(
            forward(*given, start, end, scale=problem.scale, scales=scales, backend=backend)
        )
    for state in found:
        assert all(torch.equal(a, b) for a, b in zip(state, found[0], strict=True))
        assert (state.out[:, :, :7] == 0).all()
        assert not any(x.isnan().any() for x in state)


def test_wrong_operands() -> None:
    problem = Problem()
    (q, of_q), (k, of_k), (v, of_v) = map(quantized, problem.inputs[:3])
    start, end = problem.intervals(torch.arange(61))
    for scales, says in (
        (None, "q: got torch.uint8, expected one of torch.float32"),
        ((of_q, of_k[:, :, 1:], of_v), "scales of k: got shape"),
        ((of_q, of_k, of_v.double()), "scales of v: got torch.float64, expected torch.float32"),
    ):
        with pytest.raises(ValueError, match=says):
            forward(q, k, v, start, end, scale=1.0, scales=scales)
    with pytest.raises(ValueError, match=r"q: got torch.float32, expected one of .*e4m3"):
        forward(*problem.inputs[:3], start, end, scale=1.0, scales=(of_q, of_k, of_v))
    q8, k8, v8 = (x.view(DTYPE) for x in (q, k, v))
    with pytest.raises(ValueError, match=r"q: got torch.float8_e4m3fn, expected one of"):
        backward(q8, q8, k8, v8, of_q, of_q, start, end, scale=1.0, dq=q8, dk=k8, dv=v8)


# On rings


def cases(size: int) -> list[Case]:
    heads, kv_heads = HEADS[size]
    masks: tuple[dict[str, Any], ...] = ({}, {"window": 7}, {"causal": False, "cu": (0, 30, 61)})
    every = itertools.product(names(size), PARTITIONS)
    return [
        Case(
            partition, (torch.bfloat16, torch.float32)[turn % 2], transport=name, heads=heads,
            kv_heads=kv_heads, value_dim=(None, 24, 8)[turn % 3], with_sinks=turn % 5 == 0,
            softcap=(None, 2.0)[turn % 2], **masks[turn % 3],
        )
        for turn, (name, partition) in enumerate(every)
    ]  # fmt: skip


def rings(rank: int, size: int) -> None:
    """Every transport computes what one process would of the same bits, and sends what the planner
    says."""
    for case in cases(size):
        q, k, v, _ = case.shards()
        before = METER.snapshot()
        out = ringray.ring_attention(q, k, v, quantize="fp8", sinks=case.sinks, **case.arguments)
        used = METER.since(before)
        assert out.dtype == case.dtype
        whole = ringray.unshard(out, dim=2, partition=case.dealt, seq_len=case.seq_len)
        seen, scoring = testing.visible(case.seq_len, **case.mask), case.scoring
        want = testing.oracle(*wide(*case.inputs[:3]), None, seen, scale=case.factor, **scoring)
        error = float((whole.double() - want.out).norm() / want.out.norm())
        assert error < 0.01, (case, size, error)  # of bf16
        counts = torch.tensor([used.sent_bytes, used.messages])
        dist.all_reduce(counts)
        said = planned(case, size, backward=False, quantize="fp8")
        assert counts.tolist() == [said.sent_bytes, said.messages], (case, size)
        if "ulysses" not in case.transport and "hybrid" not in case.transport:
            full = planned(case, size, backward=False).sent_bytes
            width = case.head_dim + (case.value_dim or case.head_dim)
            assert said.sent_bytes * width * case.dtype.itemsize == full * (width + 8)


@pytest.mark.parametrize("size", [*exhaustive(2), 3, *exhaustive(4)])
def test_rings(size: int) -> None:
    on_ring(size, (rings,))


def test_compiled() -> None:
    q, k, v, _ = Case("zigzag", seq_len=64).inputs
    compiled = torch.compile(ringray.ring_attention, backend="eager", fullgraph=True)
    want = ringray.ring_attention(q, k, v, quantize="fp8")
    assert torch.equal(compiled(q, k, v, quantize="fp8"), want)
    with pytest.raises(ValueError, match=r"quantize: got 8, expected None or 'fp8'"):
        compiled(q, k, v, quantize=8)
