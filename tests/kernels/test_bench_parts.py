"""Parts of the benchmark: points and their FLOPs, checks, contenders."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ringray_kernels import testing
from ringray_kernels.bench import checks, flex, measure, problems
from ringray_kernels.bench.contenders import CONTENDERS
from ringray_kernels.bench.problems import Point

CPU = torch.device("cpu")
POINTS = [
    Point("full", 96, 32, 2, 2),
    Point("causal", 131, 32, 4, 2),
    Point("window", 131, 32, 2, 2, window=40),
    Point("window", 61, 32, 2, 2, window=100),
    Point("documents", 131, 32, 2, 2),
    Point("documents", 131, 16, 2, 1, "float32"),
    Point("causal", 64, 16, 2, 2, "float16"),
]
EVERY = [replace(point, direction=way) for point in POINTS for way in ("forward", "backward")]  # type: ignore[arg-type]


def ignore(text: str) -> None:
    """Told what is being done."""


def measured(point: Point, *names: str, peak: float | None = None) -> dict[str, measure.Record]:
    found = measure.measure(point, names, CPU, ignore, peak=peak)
    return {record.contender: record for record in found}


def seen(point: Point) -> Tensor:
    bounds = point.boundaries
    return testing.visible(
        point.seq_len, causal=point.causal, window=point.window,
        cu_seqlens=None if bounds is None else torch.tensor(bounds),
    )  # fmt: skip


def exact(point: Point, inputs: problems.Inputs) -> dict[str, Tensor]:
    """All results from the fp64 oracle."""
    found = testing.oracle(*inputs, seen(point), scale=point.scale)
    if point.direction == "forward":
        return {"out": found.out}
    return {name: getattr(found, name) for name in ("dq", "dk", "dv")}


@pytest.mark.parametrize("point", EVERY, ids=lambda p: p.name)
def test_flops_are_counted_from_the_visible_pairs(point: Point) -> None:
    pairs = int(seen(point).sum())
    assert point.pairs == pairs
    forward = 4 * pairs * point.head_dim * point.heads
    assert point.flops == forward * (2.5 if point.direction == "backward" else 1)


def test_points_have_names_of_their_own_and_mean_what_they_say() -> None:
    for which in ("quick", "all"):
        for device in ("cuda", "cpu"):
            names = [p.name for p in problems.points(which, device)]  # type: ignore[arg-type]
            rings = problems.virtual_points(which, device)  # type: ignore[arg-type]
            names += [name for r in rings for name in (r.name("forward"), r.name("backward"))]
            assert len(set(names)) == len(names)
    assert Point("window", 65536, heads=32, kv_heads=8, window=4096).name == (
        "forward/window4k/64k/d128/h32x8/bf16"
    )
    for wrong in (
        {"mask": "causal", "window": 3},
        {"mask": "window"},
        {"mask": "full", "heads": 3},
    ):
        with pytest.raises(ValueError, match=r"window|heads"):
            Point(**{"seq_len": 8, "kv_heads": 2, **wrong})  # type: ignore[arg-type]


def test_headlines_are_dense_points_of_16k() -> None:
    every = problems.points("all", "cuda")
    assert [p.name for p in every if problems.is_headline(p)] == [
        f"{direction}/{mask}/16k/d128/h16/bf16"
        for direction in ("forward", "backward")
        for mask in ("causal", "full")
    ]


@pytest.mark.parametrize("point", EVERY, ids=lambda p: p.name)
def test_checks_accept_what_is_right_and_catch_one_percent(point: Point) -> None:
    inputs = problems.make_inputs(point, CPU, 0)
    right = checks.reference(point, inputs)
    results = exact(point, inputs)
    fine = checks.check(results, right, point.torch_dtype)
    assert fine.reason is None
    assert fine.share < 1e-3
    rounded = {name: x.to(point.torch_dtype) for name, x in results.items()}
    assert checks.check(rounded, right, point.torch_dtype).share < 0.5
    factor = 1.013 if point.dtype == "bfloat16" else 1.01
    for name, x in results.items():
        wrong = checks.check({**results, name: x * factor}, right, point.torch_dtype)
        assert wrong.reason is not None
        assert name in wrong.reason
        # One head of several, and the late rows only, which are small.
        for part in (x[:, -1], x[:, :, x.shape[2] // 2 :]):
            saved = part.clone()
            part *= 1.05
            assert checks.check(results, right, point.torch_dtype).reason
            part.copy_(saved)


def test_checks_work_in_chunks_and_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    point = Point("documents", 131, 16, 4, 2, direction="backward")
    inputs = problems.make_inputs(point, CPU, 0)
    whole = checks.reference(point, inputs)
    monkeypatch.setattr(checks, "_ELEMENTS", 1000)
    monkeypatch.setattr(checks, "_FP64_ROWS", 100)
    parts = checks.reference(point, inputs)
    assert parts["dk"].want.dtype == torch.float32
    for name, (want, *_) in whole.items():
        torch.testing.assert_close(parts[name].want.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_value_that_is_not_finite_is_found_anywhere(value: float) -> None:
    point = Point("causal", 131, 16, 3, 3)
    inputs = problems.make_inputs(point, CPU, 0)
    right = checks.reference(point, inputs)
    results = exact(point, inputs)
    results["out"][0, 1, 77, 3] = value  # neither a sampled head nor row
    verdict = checks.check(results, right, point.torch_dtype)
    assert verdict.reason == "out is not finite everywhere"
    assert json.loads(
        measure.Record("a", "b", "wrong", share=verdict.share).json({}, None)
    )["share"] == "inf"  # fmt: skip


@pytest.mark.rotating(3)
@pytest.mark.parametrize("point", EVERY, ids=lambda p: p.name)
def test_ours_and_sdpa_are_right(point: Point) -> None:
    records = measured(point, "ringray", "sdpa-flash")
    assert records["ringray"].status == "ok", records
    assert records["ringray"].share is not None
    assert records["ringray"].share <= 1
    plain = point.mask in ("full", "causal")
    assert records["sdpa-flash"].status == ("ok" if plain else "unsupported")


def test_inputs_exceed_twice_the_cache_as_far_as_memory_allows() -> None:
    point = Point("causal", 64, 16, 2, 2)  # 4 KiB a tensor, 12 read forward
    plenty = 1 << 30
    for cache, count in ((0, 1), (6 << 10, 2), (7 << 10, 2), (24 << 10, 5), (1 << 30, 8)):
        assert len(problems.make_sets(point, CPU, cache, plenty)) == count
    assert len(problems.make_sets(point, CPU, 1 << 30, 200 << 10)) == 2
    assert len(problems.make_sets(point, CPU, 1 << 30, 0)) == 1
    a, b = problems.make_sets(point, CPU, 6 << 10, plenty)
    assert not torch.equal(a.q, b.q)


def fake_flash(calls: list[dict[str, Any]]) -> ModuleType:
    """A package with flash-attn's calls, (B, S, H, D) or packed (S, H, D), computed plainly."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        rows = torch.arange(q.shape[2])
        mask = (rows[:, None] >= rows) if causal else torch.ones(len(rows), len(rows)) > 0
        if window[0] >= 0:
            mask &= rows[:, None] - rows <= window[0]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return found.transpose(1, 2)

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float,
        window_size: tuple[int, int] = (-1, -1),
    ) -> tuple[Tensor, None]:  # fmt: skip
        calls.append({"scale": softmax_scale})
        return attend(q, k, v, causal, window_size), None

    def varlen(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
        causal: bool = False, softmax_scale: float = 0.0, window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        bounds = cu_q.tolist()
        assert cu_q.dtype == torch.int32
        assert max_q == max_k == max(b - a for a, b in itertools.pairwise(bounds))
        causal |= window_size[1] == 0
        parts = [
            attend(*(x[None, a:b] for x in (q, k, v)), causal, window_size)[0]
            for a, b in itertools.pairwise(bounds)
        ]
        return torch.cat(parts)

    module = ModuleType("fake_flash")
    module.__spec__ = sys.__spec__
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = module.varlen_attn = varlen  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("name", ["flash-attn", "flash-attn-3", "torch-varlen"])
@pytest.mark.parametrize("point", EVERY, ids=lambda p: p.name)
def test_packages_get_their_own_layout(
    monkeypatch: pytest.MonkeyPatch, name: str, point: Point
) -> None:
    """Against stand-ins: the real ones need a GPU."""
    real = {
        "flash-attn": "flash_attn",
        "flash-attn-3": "flash_attn_interface",
        "torch-varlen": "torch.nn.attention.varlen",
    }[name]
    monkeypatch.setitem(sys.modules, real, fake_flash([]))
    contender = CONTENDERS[name]
    limits = contender.unsupported(point, torch.device("cuda"))
    if limits:
        assert name == "torch-varlen" or point.dtype == "float32"
        return
    assert contender.unsupported(point, CPU) == "needs a GPU"
    inputs = problems.make_inputs(point, CPU, 0)
    results = contender.prepare(point, inputs)
    for _ in range(2):
        verdict = checks.check(results(), checks.reference(point, inputs), point.torch_dtype)
        assert verdict.reason is None


@pytest.mark.parametrize("point", [*EVERY, *problems.smoke_points("cpu")], ids=lambda p: p.name)
def test_forward_in_8_bits_is_checked_as_such(point: Point) -> None:
    ours = CONTENDERS["ringray-fp8"]
    if point.direction == "backward" or point.dtype == "float32":
        assert ours.unsupported(point, CPU) == "8 bits in place of 16, forward only"
        return
    assert ours.unsupported(point, CPU) is None
    inputs = problems.make_inputs(point, CPU, 0)
    right, results = checks.reference(point, inputs), ours.prepare(point, inputs)()
    assert results["out"].dtype == point.torch_dtype
    fine = checks.check(results, right, point.torch_dtype, quantized=ours.quantized)
    assert fine.reason is None
    assert fine.errors["out"] > 0.02, "as many as 8 bits have"
    results["out"] *= 1.07
    wrong = checks.check(results, right, point.torch_dtype, quantized=ours.quantized)
    assert wrong.reason is not None


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.name)
def test_flex_gets_the_right_blocks(monkeypatch: pytest.MonkeyPatch, point: Point) -> None:
    """Not compiled: that needs a GPU."""
    point = replace(point, seq_len=3 * point.seq_len)
    mask = flex.block_mask(point, CPU)
    blocks = -(-point.seq_len // 128)
    if mask is not None:
        pad = 128 * blocks - point.seq_len
        wide = torch.nn.functional.pad(seen(point), (0, pad, 0, pad))
        tiles = wide.view(blocks, 128, blocks, 128).transpose(1, 2).flatten(2)
        assert torch.equal(mask.to_dense()[0, 0].bool(), tiles.any(-1))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    flex._compiled.cache_clear()
    inputs = problems.make_inputs(point, CPU, 0)
    got = CONTENDERS["flex"].prepare(point, inputs)()
    assert checks.check(got, checks.reference(point, inputs), point.torch_dtype).reason is None
    flex._compiled.cache_clear()
