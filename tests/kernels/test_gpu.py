"""The Triton kernels on a real GPU: the numerical contract, compiled instead of interpreted.

``pytest -m gpu -n auto tests``; most of the time goes into compilation. A kernel that hangs ends
its process a minute later; under ``-n`` the other tests go on in a new one.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ringray_kernels import Blocks
from ringray_kernels.api import load_backend
from ringray_kernels.backends import GPU_ONLY
from ringray_kernels.bench.watchdog import Watchdog
from ringray_kernels.checks import DTYPES
from ringray_kernels.defaults import PORTABLE
from tests.support.backend_problems import (
    LAYOUTS,
    ON_GPU,
    Problem,
    Result,
    check,
    compute,
    hidden_may_hold_anything,
    layouts,
    nobody_sees_anything,
)

pytestmark = ON_GPU
PATIENCE_S = 60.0

ROWS = 333
HEAD_DIMS = (16, 64, 80, 128, 256)
MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 100},
    "documents": {"causal": True, "cu": (0, 5, 5, 140, 333)},
    "both sides": {"causal": False, "window": (30, 100)},
    "chunk and prefix": {"causal": True, "chunk": 150, "prefix": 100},
    "full documents": {"causal": False, "cu": (0, 201, 333)},
    "window and documents": {"causal": True, "window": 30, "cu": (0, 1, 150, 333)},
}
HOPPER = (
    torch.cuda.is_available()
    and torch.version.hip is None
    and torch.cuda.get_device_capability() == (9, 0)
)
PATHS = [
    "default",
    pytest.param(
        "portable", marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
    ),
]  # fmt: skip
DTYPE_IDS = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def hung(doing: str) -> None:
    print(f"no progress for {PATIENCE_S:g} s: {doing}", file=sys.__stderr__, flush=True)


watchdog = Watchdog(PATIENCE_S, hung)


@pytest.fixture(autouse=True)
def watched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the process if the device does: its waits run no signal handlers."""
    global watchdog
    with Watchdog(PATIENCE_S, hung) as watchdog:
        watchdog.mark(request.node.name)
        yield


def problem(mask: str, head_dim: int = 64, **settings: Any) -> Problem:
    """One of batch 2 with four heads."""
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "rows": ROWS, "dtype": torch.bfloat16}
    return Problem(head_dim=head_dim, device="cuda", **{**sizes, **MASKS[mask], **settings})


def blocks_of(path: str, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Blocks | None:
    """The default, or the portable kernels where those are not the default."""
    if path == "default":
        return None
    if head_dim not in PORTABLE or dtype == torch.float32:
        pytest.skip(f"portable is the default for head dim {head_dim}, {dtype}")
    return PORTABLE[head_dim]


def run(problem: Problem, parts: list[Tensor] | None = None, backend: str = "triton") -> Result:
    watchdog.mark(f"{backend}: {problem}")
    return compute(backend, problem, problem.inputs, parts)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_masks_and_shared_heads(dtype: torch.dtype, head_dim: int, path: str) -> None:
    blocks = blocks_of(path, head_dim, dtype)
    for mask, kv_heads in itertools.product(MASKS, (4, 2, 1)):
        case = problem(mask, head_dim, dtype=dtype, kv_heads=kv_heads, blocks=blocks)
        check(case, run(case))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 63, 111, 128, 1000])
def test_odd_lengths(rows: int, path: str) -> None:
    for mask, head_dim in itertools.product(("full", "causal", "window"), (64, 128)):
        case = problem(mask, head_dim, rows=rows, blocks=blocks_of(path, head_dim))
        got = run(case)
        if rows >= 61:  # on fewer the yardstick's own error is a matter of luck
            check(case, got)
        assert all(bool(x.isfinite().all()) for x in (got.out, got.lse, *got.grads.values()))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_hops_merge_into_attention_over_all_keys(
    dtype: torch.dtype, head_dim: int, path: str
) -> None:
    blocks = blocks_of(path, head_dim, dtype)
    for mask in MASKS:
        case = problem(mask, head_dim, dtype=dtype, blocks=blocks)
        keys = case.everyone
        for parts in (
            [keys[::2].contiguous(), keys[1::2].contiguous()],
            [keys[200:], keys[:90], keys[90:200]],
            [keys[i::4].contiguous() for i in (3, 0, 2, 1)],
        ):
            check(case, run(case, parts))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["triton", "aten", *GPU_ONLY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_any_strides(dtype: torch.dtype, backend: str, layout: str) -> None:
    case = problem("window", dtype=dtype)
    plain = case.inputs
    if reason := load_backend(backend).unsupported(plain[0]):
        pytest.skip(reason)
    for chosen in ((0,), (1, 2), (3,), (0, 1, 2, 3)):
        q, k, v, dout = (layouts(x)[layout] if i in chosen else x for i, x in enumerate(plain))
        check(case, compute(backend, case, (q, k, v, dout)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_identical_runs_are_bitwise_equal(head_dim: int, path: str) -> None:
    blocks = blocks_of(path, head_dim)
    for dtype in (torch.bfloat16, torch.float16):
        for mask, rows in (("full", 1000), ("causal", 1000), ("window and documents", ROWS)):
            case = problem(mask, head_dim, dtype=dtype, heads=8, rows=rows, blocks=blocks)
            first, *others = (run(case) for _ in range(5))
            for other in others:
                assert torch.equal(other.out, first.out), case
                assert torch.equal(other.lse, first.lse), case
                for name, x in other.grads.items():
                    assert torch.equal(x, first.grads[name]), f"{case}: {name}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_rows_that_nobody_sees_may_hold_anything(
    dtype: torch.dtype, head_dim: int, path: str
) -> None:
    """Keys outside of every interval, and queries whose interval is empty."""
    blocks = blocks_of(path, head_dim, dtype)
    case = problem("causal", head_dim, dtype=dtype)
    start, end = (x.clamp(7, 300) for x in case.intervals(case.everyone))
    end[:, 300:] = start[:, 300:] = 300  # these see nothing, as those before row 7
    hidden_may_hold_anything("triton", case.inputs, start, end, scale=case.scale, blocks=blocks)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("at", [0, 128, 300, 333])
def test_a_hop_in_which_nobody_sees_anything(at: int, head_dim: int, path: str) -> None:
    blocks = blocks_of(path, head_dim)
    nobody_sees_anything("triton", problem("causal", head_dim, blocks=blocks), at)


def compiled() -> int:
    """Returns the number of variants of our kernels that this process has compiled or loaded."""
    package = importlib.import_module("ringray_kernels.backends.triton")
    kernels = {}
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for one in vars(importlib.import_module(info.name)).values():
            if hasattr(one, "device_caches"):
                kernels[id(one)] = one
    assert kernels
    return sum(len(cache[0]) for one in kernels.values() for cache in one.device_caches.values())


@pytest.mark.parametrize("name", ["aten", "reference", *GPU_ONLY])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_kernels_of_vendors(dtype: torch.dtype, head_dim: int, name: str) -> None:
    """Alone, and in hops of neighbouring and of striped keys, whose steps are masked."""
    for mask, kv_heads in itertools.product(MASKS, (4, 1)):
        case = problem(mask, head_dim, dtype=dtype, kv_heads=kv_heads)
        keys = case.everyone
        if reason := load_backend(name).unsupported(case.inputs[0]):
            pytest.skip(reason)
        for parts in (None, [keys[:160], keys[160:]], [keys[1::2], keys[::2]]):
            check(case, run(case, parts, name))


@pytest.mark.parametrize("head_dim", [80, 128])
def test_a_length_sweep_compiles_once(head_dim: int) -> None:
    before = compiled()
    run(problem("causal", head_dim, rows=256))
    once = compiled()
    assert once > before or before > 0
    for rows in (16, 100, 255, 257, 512, 777, 1024, 2000):
        run(problem("causal", head_dim, rows=rows))
        assert compiled() == once, f"{rows} rows compiled again"
