"""The Triton kernels in the interpreter, beyond what the contract suite asks of every backend."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from ringray_kernels import Blocks, State, backward, delta, forward, testing
from ringray_kernels.api import load_backend
from ringray_kernels.backends.triton import arguments
from ringray_kernels.checks import DTYPES
from ringray_kernels.config import TARGETS, BlockConfig
from ringray_kernels.config import Problem as KernelProblem
from ringray_kernels.intervals import intervals, visible_range
from tests.support.exhaustive import exhaustive

MASKS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 19},
    "documents": {"causal": True, "cu_seqlens": torch.tensor([0, 5, 5, 40, 97])},
    "both sides": {"causal": False, "window": (9, 30)},
    "chunk and prefix": {"causal": True, "chunk": 40, "prefix": 30},
    "full documents": {"causal": False, "cu_seqlens": torch.tensor([0, 33, 97])},
    "window and documents": {
        "causal": True, "window": 9, "cu_seqlens": torch.tensor([0, 1, 50, 97]),
    },
}  # fmt: skip
SMALL = Blocks.parse("forward=32x32/4/2,dq=32x32/4/2,dkv=32x32/4/2")
ROWS = 97


@pytest.fixture(autouse=True)
def usable() -> None:
    reason = load_backend("triton").unsupported(torch.zeros(1, 1, 1, 16))
    if reason:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the kernels are given to write to holds NaN."""
    empty = torch.empty

    def full(*args: Any, **options: Any) -> Tensor:
        made = empty(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", full)


def bounds(mask: str, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
    positions = torch.arange(ROWS)
    low, high = visible_range(positions, ROWS, **MASKS[mask])
    start, end = intervals(low, high, positions if keys is None else keys)
    return start[None], end[None]


def inputs(
    head_dim: int = 16, heads: int = 2, kv_heads: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    return testing.make_inputs(1, heads, kv_heads, ROWS, head_dim, dtype, seed=1)


def computed(
    given: tuple[Tensor, ...], start: Tensor, end: Tensor, scale: float, blocks: Blocks | None,
    backend: str = "triton",
) -> dict[str, Tensor]:  # fmt: skip
    q, k, v, dout = given
    more: dict[str, Any] = {"scale": scale, "backend": backend, "blocks": blocks}
    out, lse = forward(q, k, v, start, end, out_dtype=q.dtype, **more)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    rows = delta(dout, out, lse, backend=backend)
    backward(dout, q, k, v, lse, rows, start, end, dq=dq, dk=dk, dv=dv, out=out, **more)
    return {"out": out, "dq": dq.to(q.dtype), "dk": dk.to(q.dtype), "dv": dv.to(q.dtype)}


def check(given: tuple[Tensor, ...], mask: str, got: dict[str, Tensor], scale: float) -> None:
    seen = testing.visible(ROWS, **MASKS[mask])
    want = testing.oracle(*given, seen, scale=scale)  # type: ignore[arg-type]
    yard = testing.yardstick(*given, seen, scale=scale, causal=MASKS[mask]["causal"])  # type: ignore[arg-type]
    for name, tensor in got.items():
        share = testing.budget_share(tensor, getattr(want, name), getattr(yard, name), given[3])
        assert share <= 1, f"{mask} {given[0].shape} {given[0].dtype}: {name} takes {share:.3f}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_everything_by_everything(mask: str, head_dim: int) -> None:
    for dtype, kv_heads in itertools.product(DTYPES, (1, 2)):
        given = inputs(head_dim, kv_heads=kv_heads, dtype=dtype)
        got = computed(given, *bounds(mask), head_dim**-0.5, SMALL)
        check(given, mask, got, head_dim**-0.5)
        again = computed(given, *bounds(mask), head_dim**-0.5, SMALL)
        assert all(torch.equal(again[name], got[name]) for name in got)


@pytest.mark.parametrize(
    ("mask", "head_dim", "dtype"),
    [("window and documents", 80, torch.bfloat16), ("full documents", 64, torch.float16)],
)
def test_a_part_of_it(mask: str, head_dim: int, dtype: torch.dtype) -> None:
    given = inputs(head_dim, dtype=dtype)
    check(given, mask, computed(given, *bounds(mask), 0.2, SMALL), 0.2)


CUTS = {
    "packed": "forward=64x32/4/2/pack4,dq=32x16/4/2/pack2",
    "split": "dkv=32x32/4/2/split",
    "descriptors": "forward=32x32/4/2/descriptors,dq=32x32/4/2/descriptors,"
    "dkv=32x32/4/2/descriptors/split",
}


@pytest.mark.parametrize("cut", CUTS)
def test_ways_to_cut(cut: str) -> None:
    given = inputs(16, heads=4)
    check(given, "causal", computed(given, *bounds("causal"), 0.2, Blocks.parse(CUTS[cut])), 0.2)


@pytest.mark.parametrize("scale", [-0.3, 2.0])
def test_any_scale(scale: float) -> None:
    """PyTorch's flash kernel gives NaN where scale is not positive, so the oracle is compared."""
    given = inputs()
    got = computed(given, *bounds("causal"), scale, SMALL)
    want = testing.oracle(*given, testing.visible(ROWS, causal=True), scale=scale)  # type: ignore[arg-type]
    for name, tensor in got.items():
        torch.testing.assert_close(tensor.double(), getattr(want, name), atol=2e-5, rtol=1e-4)


def test_merging_is_attention_over_both() -> None:
    q, k, v, _ = inputs(80)
    whole = forward(q, k, v, *bounds("causal"), scale=0.2, blocks=SMALL, backend="triton")
    state: State | None = None
    for keys in (torch.arange(1, ROWS, 2), torch.arange(0, ROWS, 2)):
        state = forward(
            q, k[:, :, keys], v[:, :, keys], *bounds("causal", keys), scale=0.2, state=state,
            blocks=SMALL, backend="triton",
        )  # fmt: skip
    assert state is not None
    torch.testing.assert_close(state.out, whole.out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(state.lse, whole.lse, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "at"), [*zip(DTYPES, (0, 31, 300), strict=True)], ids=str)
def test_a_hop_in_which_nobody_sees_anything(dtype: torch.dtype, at: int) -> None:
    """The position of empty intervals and the content of unseen keys must not matter."""
    generator = torch.Generator().manual_seed(at)
    q = torch.randn(1, 2, 130, 16, generator=generator).to(dtype)
    k, v = (torch.full((1, 1, 300, 16), float("nan"), dtype=dtype) for _ in range(2))
    nothing = torch.full((1, 130), at, dtype=torch.int32)
    found = State(
        torch.randn(q.shape, generator=generator), torch.randn(q.shape[:3], generator=generator)
    )
    for blocks, out_dtype in itertools.product((SMALL, None), {dtype, torch.float32}):
        more: dict[str, Any] = {
            "scale": 0.2, "blocks": blocks, "out_dtype": out_dtype, "backend": "triton",
        }  # fmt: skip
        out, lse = forward(q, k, v, nothing, nothing, **more)
        assert out.dtype == out_dtype
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        state = State(found.out.clone(), found.lse.clone())
        out, lse = forward(q, k, v, nothing, nothing, state=state, **more)
        torch.testing.assert_close(out, found.out.to(out_dtype))
        torch.testing.assert_close(lse, found.lse)


def windowed_ring(dtype: torch.dtype, backend: str) -> tuple[State, list[Tensor]]:
    """The last of three contiguous ranks of 512 rows, with a window of 140: its second hop is
    empty but for the first rows, its third altogether."""
    rows, ranks, window = 512, 3, 140
    q, k, v, dout = testing.make_inputs(1, 1, 1, ranks * rows, 16, dtype, seed=3)
    mine = torch.arange((ranks - 1) * rows, ranks * rows)
    low, high = visible_range(mine, ranks * rows, causal=True, window=window)
    q, dout = q[:, :, mine], dout[:, :, mine]
    shards = [torch.arange(rank * rows, (rank + 1) * rows) for rank in reversed(range(ranks))]
    hops = [[x[None] for x in intervals(low, high, keys)] for keys in shards]
    state: State | None = None
    for i, (keys, bounds) in enumerate(zip(shards, hops, strict=True)):
        state = forward(
            q, k[:, :, keys], v[:, :, keys], *bounds, scale=0.25, state=state, backend=backend,
            out_dtype=dtype if i == ranks - 1 else None,
        )  # fmt: skip
    assert state is not None
    grads = [torch.zeros(x.shape) for x in (q, k, v)]
    total = delta(dout, state.out, state.lse, backend=backend)
    for keys, bounds in zip(shards, hops, strict=True):
        part = slice(int(keys[0]), int(keys[-1]) + 1)
        backward(
            dout, q, k[:, :, part], v[:, :, part], state.lse, total, *bounds, scale=0.25,
            dq=grads[0], dk=grads[1][:, :, part], dv=grads[2][:, :, part], backend=backend,
        )  # fmt: skip
    return state, grads


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(torch.float16)], ids=str)
def test_a_ring_whose_window_is_shorter_than_a_shard(dtype: torch.dtype) -> None:
    (got, grads), (want, wanted) = (windowed_ring(dtype, name) for name in ("triton", "reference"))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.lse, want.lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.out, want.out, atol=4 * eps, rtol=4 * eps)
    for one, other in zip(grads, wanted, strict=True):
        assert (one - other).norm() <= eps * other.norm()


def test_non_finite_inputs_pass_through() -> None:
    """To the rows that see them, and no further."""
    q, k, v, _ = inputs(kv_heads=2)
    v[0, 0, 50, 3], v[0, 1, 60, 2] = float("inf"), float("nan")
    out, lse = forward(q, k, v, *bounds("causal"), scale=0.2, blocks=SMALL, backend="triton")
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2)
    for head, row in ((0, 50), (1, 60)):
        assert out[0, head, :32].isfinite().all()  # blocks that do not see it
        assert not out[0, head, row:].isfinite().all(-1).any()
        assert not want[0, head, row:].isfinite().all(-1).any()
    assert lse.isfinite().all()


@pytest.mark.parametrize("blocks", [SMALL, Blocks.parse(CUTS["descriptors"])], ids=str)
def test_keys_between_those_of_a_block_may_hold_anything(blocks: Blocks) -> None:
    """The first block of rows sees keys on both sides of them."""
    q, k, v, dout = inputs()
    rows = torch.arange(ROWS)
    start, end = torch.where(rows < 10, 0, 50).int(), torch.where(rows < 10, 20, ROWS).int()
    want = computed((q, k, v, dout), start[None], end[None], 0.2, None, backend="reference")
    k[:, :, 20:50], v[:, :, 20:50] = float("nan"), float("inf")
    got = computed((q, k, v, dout), start[None], end[None], 0.2, blocks)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(got[name], want[name], atol=2e-5, rtol=1e-4)


def test_offsets_that_32_bits_do_not_hold_are_not_used() -> None:
    def readable(*strides: int) -> Tensor:
        x = torch.empty_strided((1, 2, 300, 64), strides, dtype=torch.half, device="meta")
        return load_backend("triton")._readable(x)  # type: ignore[attr-defined,no-any-return]

    assert readable(2**40, 2**34, 64, 1).stride() == (2**40, 2**34, 64, 1)
    for wide in ((1, 1, 1, 2**26), (2**40, 2**34, 2**24, 1)):
        assert readable(*wide).is_contiguous()


def test_what_is_not_supported_is_told() -> None:
    q, k, v, _ = inputs()
    start, end = bounds("causal")

    def attempt(**changes: Any) -> None:
        forward(**{"q": q, "k": k, "v": v, "start": start, "end": end, "scale": 1.0,
                   "backend": "triton", **changes})  # fmt: skip

    with pytest.raises(ValueError, match="backend 'triton' takes None or a "):
        attempt(blocks=64)
    some = torch.zeros(1, 8, dtype=torch.int32)
    for head_dim, said in ((257, "no forward configuration"), (513, "expected at most 512")):
        wide = torch.zeros(1, 2, 8, head_dim)
        with pytest.raises(ValueError, match=said):
            attempt(q=wide, k=wide, v=wide, start=some, end=some)
    with pytest.raises(ValueError, match="expected one of torch"):
        attempt(q=q.double(), k=k.double(), v=v.double())
    for name, shape in (("batch", (65536, 1, 1, 16)), ("heads", (1, 65536, 1, 16))):
        many, row = torch.zeros(shape), torch.zeros(1, 1, dtype=torch.int32)
        with pytest.raises(ValueError, match=f"{name}: got 65536, expected at most 65535"):
            attempt(q=many, k=many, v=many, start=row, end=row)
    arguments.Launch(None, (1 << 11, 1 << 10, (1 << 10) - 1), (), {})
    with pytest.raises(ValueError, match=r"got 2147483648 blocks .* fewer than 2\^31"):
        arguments.Launch(None, (1 << 11, 1 << 10, 1 << 10), (), {})
    config, problem = BlockConfig.parse("128x128/8/4"), KernelProblem("forward", 128, 2)
    with pytest.raises(ValueError, match="forward config 128x128/8/4: tiles take"):
        arguments.configured(config, problem, TARGETS["sm_90"])
