"""Predicted memory of one call beside what PyTorch's allocator reports."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from ringray.base import provenance
from ringray.lab.predict import peak_memory
from ringray.lab.predict.peak_memory import Sizes
from ringray.lab.trial import measurement
from ringray_kernels import api
from ringray_kernels.dtypes import torch_dtype

HEADS = 4


def measured(direction: str, dtype: str, rows: int, dim: int, end: torch.Tensor) -> int:
    """Peak bytes of one call on rows that see their first ``end`` keys."""
    made = [torch.randn(1, HEADS, rows, dim) for _ in range(4)]
    q, k, v, dout = (x.to(torch_dtype(dtype)) for x in made)
    sums = [torch.zeros_like(x) for x in made[:3]]
    lse, start = torch.full((1, HEADS, rows), 9.0), torch.zeros_like(end)

    def call() -> None:
        if direction == "forward":
            api.forward(q, k, v, start, end, scale=0.1, state=api.State(sums[0], lse))
        else:
            api.backward(
                dout, q, k, v, lse, lse, start, end, scale=0.1, dq=sums[0], dk=sums[1],
                dv=sums[2], out=dout,
            )  # fmt: skip

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        call()
        return measurement.peak_memory(call, torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 64), ("bfloat16", 128)])
@pytest.mark.parametrize("rows", [320, 1536])
@pytest.mark.parametrize("shape", ["causal", "one less", "stepped"])
def test_memory_of_a_call(direction: str, dtype: str, dim: int, rows: int, shape: str) -> None:
    at = np.arange(rows)
    ends = {"causal": at + 1, "one less": at, "stepped": (at + 1) // 2 * 2}[shape]
    sizes = Sizes(
        batch=1, heads=HEADS, kv_heads=HEADS, head_dim=dim, rows=rows, threads=1,
        itemsize=torch_dtype(dtype).itemsize, fused_on_cpu=True, runs=1, triangular=True,
        plain=True, **provenance.bf16_products(),
    )  # fmt: skip
    forward = direction == "forward"
    bytes_of = partial(peak_memory._forward_call if forward else peak_memory._backward_call, sizes)
    seen = np.array([float(rows - (shape == "one less"))])
    if shape == "stepped":
        bytes_of = partial(peak_memory._in_steps, bytes_of, sizes.itemsize)
    found = measured(direction, dtype, rows, dim, torch.from_numpy(ends).int()[None])
    assert bytes_of(seen, seen)[0] == pytest.approx(found, rel=0.1)


def test_a_backward_call_packs_its_operands_for_wide_vectors() -> None:
    """What torch 2.13 allocates in bf16 on cores with AVX-512, and not on others."""
    packing, plain = (
        Sizes(
            batch=1, heads=2, kv_heads=2, head_dim=128, rows=1536, threads=1, itemsize=2,
            fused_on_cpu=True, runs=1, triangular=True, plain=True, packs=packs,
        )
        for packs in (True, False)
    )  # fmt: skip
    rows = np.array([1536.0])
    both = (peak_memory._backward_call(sizes, rows, rows)[0] for sizes in (packing, plain))
    assert next(both) - next(both) == 460_800


@pytest.mark.parametrize(
    ("rows", "keys", "copied"),
    # What torch 2.13 allocates beside scores on cores with AMX: K, V, and a block of V; two heads.
    [(1536, 1536, 2 * 786_432 + 131_072), (320, 960, 2 * 491_520 + 131_072), (20, 960, 0)],
)
def test_tiles_copy_keys_and_values(rows: int, keys: int, copied: int) -> None:
    plain = Sizes(
        batch=1, heads=2, kv_heads=2, head_dim=128, rows=rows, threads=1, itemsize=2,
        fused_on_cpu=True, runs=1, triangular=True, plain=True,
    )  # fmt: skip
    sizes = (np.array([float(rows)]), np.array([float(keys)]), 1)
    more = replace(plain, tiles=True).scratch(*sizes) - plain.scratch(*sizes)
    share = plain.share(*sizes[:2])[0]
    assert more[0] == pytest.approx((copied - 131_072) * share + 131_072 if copied else 0)
