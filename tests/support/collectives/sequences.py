"""Tensors whose rows ranks share: whole again, or shifted."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import ringray
import ringray.attention.shift
from tests.support.collectives.collective import (
    ROWS,
    Calls,
    Collective,
    compiled,
    distributed,
    faked,
    in_vmap,
    while_broken,
)


def unsharding() -> Collective:
    x = torch.randn(2, ROWS, 3)
    run = partial(ringray.unshard, dim=1)
    wrong: Calls = {
        "dim: got 3": partial(ringray.unshard, x, dim=3),
        "of layout": lambda: run(distributed(x)),
        "dim: got 4": lambda: compiled(lambda x: ringray.unshard(x, dim=4), x),
        "partition: got 'zag'": partial(run, x, partition="zag"),
        "plain, dense": partial(run, x.to_sparse()),
        "cannot send tensors of meta": partial(run, x.to("meta")),
        "vmap": partial(in_vmap, run, x),
        "a FakeTensor|FakeTensors": partial(faked, run, x),
        "rank is broken": partial(
            while_broken, ringray.attention.sharding, "_rows", partial(run, x)
        ),
    }
    other: Calls = {
        "dtype: ": partial(run, x.double()),
        "shape: ": partial(run, x[..., :2]),
        "requires_grad: ": partial(run, x.clone().requires_grad_()),
        "gradients: ": partial(run, x, gradients="mean"),
        "rows_per_rank: ": partial(run, x[:, :2]),
        "seq_len: ": partial(run, x, seq_len=3 * ROWS - 1),
        "partition: ": partial(run, x, partition="striped"),
    }
    return Collective(partial(run, x), wrong, other)


def shifting() -> Collective:
    x = torch.randn(2, ROWS, 3)
    run = partial(ringray.shift, by=1, dim=1)
    wrong: Calls = {
        "dim: got 3": partial(ringray.shift, x, 1, dim=3),
        "by: got 1.5": partial(ringray.shift, x, 1.5, dim=1),  # type: ignore[arg-type]
        "fill: got 300": partial(ringray.shift, x.byte(), 1, dim=1, fill=300),
        "cu_seqlens: expected boundaries": partial(run, x, cu_seqlens=[0, 3]),
        "cu_seqlens: got 3": partial(run, x, cu_seqlens=3),
        "seq_len: ": partial(run, x, seq_len=5),
        "of layout": lambda: run(distributed(x)),
        "dim: got 4": lambda: compiled(lambda x: ringray.shift(x, 1, dim=4), x),
        "partition: got 'zag'": partial(run, x, partition="zag"),
        "cannot send tensors of meta": partial(run, x.to("meta")),
        "vmap": partial(in_vmap, run, x),
        "a FakeTensor|FakeTensors": partial(faked, run, x),
        "rank is broken": partial(while_broken, ringray.attention.shift, "_bytes", partial(run, x)),
    }
    other: Calls = {
        "by: ": partial(ringray.shift, x, 2, dim=1),
        "dtype: ": partial(run, x.double()),
        "shape: ": partial(run, x[..., :2]),
        "requires_grad: ": partial(run, x.clone().requires_grad_()),
        "fill: ": partial(run, x, fill=1),
        "seq_len: ": partial(run, x, seq_len=3 * ROWS - 1, partition="striped"),
        "cu_seqlens: ": partial(run, x, cu_seqlens=[0, 3, 12]),
        "partition: ": partial(run, x, partition="striped"),
    }
    return Collective(partial(run, x), wrong, other)


def backward_of_shift() -> Collective:
    def run(name: str | None = None) -> None:
        moved = ringray.shift(torch.randn(2, ROWS, 3).requires_grad_(), 1, dim=1)
        backward = moved.sum().backward
        target = ringray.attention.shift
        while_broken(target, name, backward) if name else backward()

    return Collective(run, {"rank is broken": partial(run, "_bytes")}, {})


def backward_of_unshard() -> Collective:
    def run(name: str | None = None) -> None:
        whole = ringray.unshard(torch.randn(2, ROWS, 3).requires_grad_(), dim=1)
        backward = whole.sum().backward
        while_broken(Tensor, name, backward) if name else backward()

    return Collective(run, {"rank is broken": partial(run, "contiguous")}, {})
