"""The Triton kernels on a real GPU: the numerical contract, compiled instead of interpreted.

``pytest -m gpu -n auto tests``; most of the time goes into compilation. A kernel that hangs ends
its process a minute later; under ``-n`` the other tests go on in a new one.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ringray_kernels import Blocks, State, backward, delta, forward, testing
from ringray_kernels.api import load_backend
from ringray_kernels.backends import GPU_ONLY
from ringray_kernels.bench.watchdog import Watchdog
from ringray_kernels.checks import DTYPES
from ringray_kernels.defaults import PORTABLE
from ringray_kernels.intervals import intervals, visible_range

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="TRITON_INTERPRET is set"),
    pytest.mark.timeout(300, method="thread"),
]

PATIENCE_S = 60.0

NAN = float("nan")
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


@dataclass(frozen=True)
class Case:
    """One problem of ``rows`` rows and batch 2; ``blocks`` None is the default."""

    mask: str = "causal"
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    heads: int = 4
    kv_heads: int = 4
    rows: int = ROWS
    blocks: Blocks | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return testing.make_inputs(
            2, self.heads, self.kv_heads, self.rows, self.head_dim, self.dtype, seed=seed,
            device="cuda",
        )  # fmt: skip

    def options(self) -> dict[str, Any]:
        mask = {**MASKS[self.mask]}
        if cu := mask.pop("cu", None):
            mask["cu_seqlens"] = torch.tensor(cu, device="cuda")
        return mask

    def bounds(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        low, high = visible_range(
            torch.arange(self.rows, device="cuda"), self.rows, **self.options()
        )
        start, end = intervals(low, high, keys)
        return start[None], end[None]


def blocks_of(path: str, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Blocks | None:
    """The default, or the portable kernels where those are not the default."""
    if path == "default":
        return None
    if head_dim not in PORTABLE or dtype == torch.float32:
        pytest.skip(f"portable is the default for head dim {head_dim}, {dtype}")
    return PORTABLE[head_dim]


def compute(
    case: Case,
    inputs: tuple[Tensor, ...],
    parts: list[Tensor] | None = None,
    backend: str = "triton",
) -> dict[str, Tensor]:
    """All hops of one rank: the keys come in ``parts`` (their positions), one call each."""
    q, k, v, dout = inputs
    parts = parts or [torch.arange(case.rows, device="cuda")]
    more: dict[str, Any] = {"scale": case.scale, "backend": backend, "blocks": case.blocks}
    hops = [(k[:, :, part], v[:, :, part], *case.bounds(part)) for part in parts]
    if len(parts) == 1:  # the given strides, not those of a copy
        hops = [(k, v, *case.bounds(parts[0]))]
    state: State | None = None
    for i, (one_k, one_v, start, end) in enumerate(hops):
        watchdog.mark(f"forward of {case}")
        out_dtype = q.dtype if i == len(hops) - 1 else None
        state = forward(q, one_k, one_v, start, end, state=state, out_dtype=out_dtype, **more)
    assert state is not None
    rows = delta(dout, state.out, state.lse, backend=backend)
    dq = torch.zeros(q.shape, device="cuda")
    grads = [torch.zeros(x.shape, device="cuda") for x in (k, v)]
    for part, (one_k, one_v, start, end) in zip(parts, hops, strict=True):
        watchdog.mark(f"backward of {case}")
        dk, dv = (torch.zeros(one_k.shape, device="cuda") for _ in range(2))
        backward(
            dout, q, one_k, one_v, state.lse, rows, start, end, dq=dq, dk=dk, dv=dv,
            out=state.out, **more,
        )  # fmt: skip
        for grad, one in zip(grads, (dk, dv), strict=True):
            grad[:, :, part] += one
    names = ("dq", "dk", "dv")
    found = {name: x.to(q.dtype) for name, x in zip(names, (dq, *grads), strict=True)}
    return {"out": state.out, **found, "lse": state.lse}


def yardstick(case: Case, inputs: tuple[Tensor, ...], seen: Tensor) -> testing.Gradients:
    """On the GPU, or on the CPU where the GPU's fused calls do not take the problem."""
    more: dict[str, Any] = {"scale": case.scale, "causal": MASKS[case.mask]["causal"]}
    try:
        return testing.yardstick(*inputs, seen, **more)  # type: ignore[arg-type]
    except RuntimeError as error:
        if "kernel" not in str(error) and "backend" not in str(error):
            raise
        found = testing.yardstick(*(x.cpu() for x in inputs), seen.cpu(), **more)  # type: ignore[arg-type]
        return testing.Gradients(*(None if x is None else x.cuda() for x in found))  # type: ignore[arg-type]


def check(case: Case, inputs: tuple[Tensor, ...], got: dict[str, Tensor]) -> None:
    """Within the error budget in all four tensors; lse too."""
    q, k, v, dout = inputs
    seen = testing.visible(case.rows, **case.options(), device="cuda")
    want = testing.oracle(q, k, v, dout, seen, scale=case.scale)
    yard = yardstick(case, inputs, seen)
    for name in ("out", "dq", "dk", "dv"):
        share = testing.budget_share(got[name], getattr(want, name), getattr(yard, name), dout)
        assert share <= 1, f"{case}: {name} takes {share:.3f} of its budget"
    wide = k.double().repeat_interleave(case.heads // case.kv_heads, 1)
    scores = (q.double() @ wide.transpose(-1, -2) * case.scale).masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1).float()
    torch.testing.assert_close(got["lse"], lse, atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_masks_and_shared_heads(dtype: torch.dtype, head_dim: int, path: str) -> None:
    blocks = blocks_of(path, head_dim, dtype)
    for mask in MASKS:
        for kv_heads in (4, 2, 1):
            case = Case(mask, head_dim, dtype, kv_heads=kv_heads, blocks=blocks)
            inputs = case.inputs()
            check(case, inputs, compute(case, inputs))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rows", [1, 63, 111, 128, 1000])
def test_odd_lengths(rows: int, path: str) -> None:
    for mask, head_dim in itertools.product(("full", "causal", "window"), (64, 128)):
        case = Case(mask, head_dim, rows=rows, blocks=blocks_of(path, head_dim))
        inputs = case.inputs()
        got = compute(case, inputs)
        if rows >= 61:  # on fewer the yardstick's own error is a matter of luck
            check(case, inputs, got)
        assert all(bool(x.isfinite().all()) for x in got.values())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_hops_merge_into_attention_over_all_keys(
    dtype: torch.dtype, head_dim: int, path: str
) -> None:
    blocks = blocks_of(path, head_dim, dtype)
    everyone = torch.arange(ROWS, device="cuda")
    for mask in MASKS:
        case = Case(mask, head_dim, dtype, kv_heads=2, blocks=blocks)
        inputs = case.inputs()
        for parts in (
            [everyone[::2].contiguous(), everyone[1::2].contiguous()],
            [everyone[200:], everyone[:90], everyone[90:200]],
            [everyone[i::4].contiguous() for i in (3, 0, 2, 1)],
        ):
            check(case, inputs, compute(case, inputs, parts))


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values in other strides, with NaN in between."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), NAN, dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    rows = x.new_full((x.shape[0], x.shape[1], 2 * x.shape[2], x.shape[3]), NAN)
    rows[:, :, ::2] = x
    odd = x.new_full((*x.shape[:-1], x.shape[-1] + 1), NAN)
    odd[..., 1:] = x
    return {
        "(B, S, H, D)": x.transpose(1, 2).contiguous().transpose(1, 2),
        "(B, H, D, S)": x.transpose(2, 3).contiguous().transpose(2, 3),
        "every other element": wide[..., ::2],
        "every other row": rows[:, :, ::2],
        "not aligned": odd[..., 1:],
    }


@pytest.mark.parametrize("layout", layouts(torch.zeros(1, 1, 1, 1)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_any_strides(layout: str, dtype: torch.dtype) -> None:
    case = Case("window", 64, dtype, kv_heads=2)
    plain = case.inputs()
    for chosen in ((0,), (1, 2), (3,), (0, 1, 2, 3)):
        inputs = tuple(layouts(x)[layout] if i in chosen else x for i, x in enumerate(plain))
        check(case, inputs, compute(case, inputs))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_identical_runs_are_bitwise_equal(head_dim: int, path: str) -> None:
    blocks = blocks_of(path, head_dim)
    for dtype in (torch.bfloat16, torch.float16):
        for mask, rows in (("full", 1000), ("causal", 1000), ("window and documents", ROWS)):
            case = Case(mask, head_dim, dtype, heads=8, kv_heads=2, rows=rows, blocks=blocks)
            inputs = case.inputs()
            first = compute(case, inputs)
            for _ in range(4):
                for name, x in compute(case, inputs).items():
                    assert torch.equal(x, first[name]), f"{case}: {name}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_rows_that_nobody_sees_may_hold_anything(
    dtype: torch.dtype, head_dim: int, path: str
) -> None:
    """Keys outside of every interval, and queries whose interval is empty."""
    blocks = blocks_of(path, head_dim, dtype)
    case = Case("causal", head_dim, dtype, kv_heads=2)
    q, k, v, dout = case.inputs()
    start, end = case.bounds(torch.arange(ROWS, device="cuda"))
    start, end = start.clamp(min=7, max=300), end.clamp(min=7, max=300)
    end[:, 300:] = start[:, 300:] = 300  # these see nothing, as those before row 7
    blind = (start >= end)[0]
    assert 0 < int(blind.sum()) < ROWS

    def both(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
        more: dict[str, Any] = {"scale": case.scale, "backend": "triton", "blocks": blocks}
        out, lse = forward(q, k, v, start, end, out_dtype=q.dtype, **more)
        rows = delta(dout, out, lse, backend="triton")
        dq, dk, dv = (torch.zeros(x.shape, device="cuda") for x in (q, k, v))
        backward(dout, q, k, v, lse, rows, start, end, dq=dq, dk=dk, dv=dv, out=out, **more)
        return [out, lse, dq, dk, dv]

    clean = both(q, k, v, dout)
    for poison in (NAN, float("inf")):
        bad = [x.clone() for x in (q, k, v, dout)]
        for x in (bad[0], bad[3]):
            x[:, :, blind] = poison
        for x in (bad[1], bad[2]):
            x[:, :, :7] = poison
            x[:, :, 300:] = poison
        got = both(*bad)
        for x, want in zip(got, clean, strict=True):
            assert torch.equal(x, want)
            assert not x.isnan().any()
        assert (got[0][:, :, blind] == 0).all()
        assert (got[1][:, :, blind] == -torch.inf).all()
        assert (got[3][:, :, :7] == 0).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("at", [0, 128, 300, 333])
def test_a_hop_in_which_nobody_sees_anything(at: int, head_dim: int, path: str) -> None:
    """The position of empty intervals and the content of unseen keys must not matter."""
    case = Case(head_dim=head_dim, kv_heads=2, blocks=blocks_of(path, head_dim))
    q, k, v, dout = case.inputs()
    k.fill_(NAN)
    v.fill_(NAN)
    nothing = torch.full((1, ROWS), at, dtype=torch.int32, device="cuda")
    found = State(torch.randn(q.shape, device="cuda"), torch.randn(q.shape[:3], device="cuda"))
    more: dict[str, Any] = {"scale": case.scale, "backend": "triton", "blocks": case.blocks}
    for out_dtype in (q.dtype, torch.float32):
        out, lse = forward(q, k, v, nothing, nothing, out_dtype=out_dtype, **more)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        state = State(found.out.clone(), found.lse.clone())
        out, lse = forward(q, k, v, nothing, nothing, state=state, out_dtype=out_dtype, **more)
        torch.testing.assert_close(out, found.out.to(out_dtype))
        torch.testing.assert_close(lse, found.lse)
    grads = [torch.ones(x.shape, device="cuda") for x in (q, k, v)]
    backward(
        dout, q, k, v, found.lse, found.lse, nothing, nothing, dq=grads[0], dk=grads[1],
        dv=grads[2], **more,
    )  # fmt: skip
    assert all((x == 1).all() for x in grads)


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
    everyone = torch.arange(ROWS, device="cuda")
    orders = (None, [everyone[:160], everyone[160:]], [everyone[1::2], everyone[::2]])
    for mask, kv_heads in itertools.product(MASKS, (4, 1)):
        case = Case(mask, head_dim, dtype, kv_heads=kv_heads)
        inputs = case.inputs()
        if reason := load_backend(name).unsupported(inputs[0]):
            pytest.skip(reason)
        for parts in orders:
            check(case, inputs, compute(case, inputs, parts, backend=name))


@pytest.mark.parametrize("layout", layouts(torch.zeros(1, 1, 1, 1)))
@pytest.mark.parametrize("name", ["aten", *GPU_ONLY])
def test_kernels_of_vendors_at_any_strides(name: str, layout: str) -> None:
    case = Case("window", 64, kv_heads=2)
    plain = case.inputs()
    if reason := load_backend(name).unsupported(plain[0]):
        pytest.skip(reason)
    inputs = tuple(layouts(x)[layout] for x in plain)
    check(case, inputs, compute(case, inputs, backend=name))


@pytest.mark.parametrize("head_dim", [80, 128])
def test_a_length_sweep_compiles_once(head_dim: int) -> None:
    def run(rows: int) -> None:
        case = Case("causal", head_dim, rows=rows)
        compute(case, case.inputs())

    before = compiled()
    run(256)
    once = compiled()
    assert once > before or before > 0
    for rows in (16, 100, 255, 257, 512, 777, 1024, 2000):
        run(rows)
        assert compiled() == once, f"{rows} rows compiled again"
