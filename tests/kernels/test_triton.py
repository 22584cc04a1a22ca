"""The Triton kernels in the interpreter, beyond what the contract suite asks of every backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ringray_kernels import Blocks, forward
from ringray_kernels.api import load_backend
from ringray_kernels.backends.triton import arguments
from ringray_kernels.checks import DTYPES
from ringray_kernels.config import TARGETS, BlockConfig
from ringray_kernels.config import Problem as KernelProblem
from tests.support.backend_problems import (
    Problem,
    hidden_may_hold_anything,
    hold,
    nobody_sees_anything,
)
from tests.support.exhaustive import exhaustive

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


CUTS = {
    "packed": "forward=64x32/4/2/pack4,dq=32x16/4/2/pack2",
    "split": "dkv=32x32/4/2/split",
    "descriptors": "forward=32x32/4/2/descriptors,dq=32x32/4/2/descriptors,"
    "dkv=32x32/4/2/descriptors/split",
}


@pytest.mark.parametrize("cut", CUTS)
def test_ways_to_cut(cut: str) -> None:
    blocks = Blocks.parse(CUTS[cut])
    hold("triton", Problem(heads=4, kv_heads=1, rows=ROWS, head_dim=16, blocks=blocks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(torch.float16)], ids=str)
def test_hops_that_most_rows_or_all_do_not_see(dtype: torch.dtype) -> None:
    problem = Problem(heads=1, kv_heads=1, rows=450, head_dim=16, dtype=dtype, window=40)
    hold("triton", problem, [problem.everyone[first : first + 150] for first in (300, 150, 0)])


@pytest.mark.parametrize(("dtype", "at"), [*zip(DTYPES, (0, 31, 300), strict=True)], ids=str)
@pytest.mark.parametrize("blocks", [SMALL, None], ids=str)
def test_a_hop_in_which_nobody_sees_anything(
    dtype: torch.dtype, at: int, blocks: Blocks | None
) -> None:
    nobody_sees_anything("triton", Problem(rows=300, head_dim=16, dtype=dtype, blocks=blocks), at)


def test_non_finite_inputs_pass_through() -> None:
    """To the rows that see them, and no further."""
    problem = Problem(rows=ROWS, head_dim=16)
    q, k, v, _ = problem.inputs
    v[0, 0, 50, 3], v[0, 1, 60, 2] = float("inf"), float("nan")
    out, lse = forward(
        q, k, v, *problem.intervals(problem.everyone), scale=0.2, blocks=SMALL, backend="triton"
    )
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2)
    for head, row in ((0, 50), (1, 60)):
        assert out[0, head, :32].isfinite().all()  # blocks that do not see it
        assert not out[0, head, row:].isfinite().all(-1).any()
        assert not want[0, head, row:].isfinite().all(-1).any()
    assert lse.isfinite().all()


@pytest.mark.parametrize("blocks", [SMALL, Blocks.parse(CUTS["descriptors"])], ids=str)
def test_keys_between_those_of_a_block_may_hold_anything(blocks: Blocks) -> None:
    """The first block of rows sees keys on both sides of them."""
    rows = torch.arange(ROWS)
    start, end = torch.where(rows < 10, 0, 50).int(), torch.where(rows < 10, 20, ROWS).int()
    inputs = Problem(rows=ROWS, head_dim=16).inputs
    hidden_may_hold_anything("triton", inputs, start[None], end[None], scale=0.2, blocks=blocks)


def test_offsets_that_32_bits_do_not_hold_are_not_used() -> None:
    def readable(*strides: int) -> Tensor:
        x = torch.empty_strided((1, 2, 300, 64), strides, dtype=torch.half, device="meta")
        return load_backend("triton")._readable(x)  # type: ignore[attr-defined,no-any-return]

    assert readable(2**40, 2**34, 64, 1).stride() == (2**40, 2**34, 64, 1)
    for wide in ((1, 1, 1, 2**26), (2**40, 2**34, 2**24, 1)):
        assert readable(*wide).is_contiguous()


def test_what_is_not_supported_is_told() -> None:
    problem = Problem(rows=ROWS, head_dim=16)
    q, k, v, _ = problem.inputs
    start, end = problem.intervals(problem.everyone)

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
