"""Checks of every rank of a mesh: the norm of all gradients, of DTensors and plain ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ringray.training import mesh as meshes
from ringray.training.gradients import clip_grad_norm, grad_norm
from ringray.training.recipe import Degrees


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norms_are_whole(degrees: Degrees, rank: int, size: int) -> None:
    """Of weights on several meshes and plain ones, some without a gradient; stages have others."""
    mesh = meshes.make_mesh(degrees)
    stage = mesh.place("pp")
    shards, both = mesh.shards, mesh.whole["cp", "tp"]
    places: list[Any] = [
        (None, None),
        (shards, [Shard(0)]),
        (shards, [Replicate()]),
        (both, [Shard(0), Shard(1)]),
    ]
    parameters, total = [nn.Parameter(torch.zeros(3))], 0.0
    for every_stage in range(degrees.pp):
        for number, (device_mesh, how) in enumerate(places):
            grad = drawn((5, 7), 10 * every_stage + number)
            total += float(grad.square().sum())
            if every_stage != stage:
                continue
            if device_mesh is None:
                weight = nn.Parameter(torch.zeros_like(grad))
                weight.grad = grad.clone()
            else:
                weight = nn.Parameter(distribute_tensor(torch.zeros_like(grad), device_mesh, how))
                weight.grad = distribute_tensor(grad, device_mesh, how)
            parameters.append(weight)
    want = total**0.5
    assert float(grad_norm(parameters, mesh)) == pytest.approx(want, rel=1e-12)
    norm = clip_grad_norm(parameters, 2.0, mesh)
    assert type(norm) is Tensor
    assert float(norm) == pytest.approx(want, rel=1e-12)
    grads = [weight.grad for weight in parameters[1:]]
    for number, grad in enumerate(grads):
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        clipped = drawn((5, 7), 10 * stage + number) * 2 / (want + 1e-6)
        torch.testing.assert_close(whole, clipped, atol=1e-12, rtol=0)
    assert float(clip_grad_norm(parameters, 1e9, mesh)) == pytest.approx(2, rel=1e-5)
    assert float(grad_norm([nn.Parameter(torch.zeros(3))], mesh)) == 0


def fsdp_is_clipped(rank: int, size: int) -> None:
    """As ``torch.nn.utils.clip_grad_norm_`` clips one process."""
    mesh = meshes.make_mesh(Degrees(cp=size))
    torch.manual_seed(0)
    alone, made = (nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)) for _ in range(2))
    made.load_state_dict(alone.state_dict())
    for part in (*made, made):
        fully_shard(part, mesh=mesh.shards)
    x = torch.randn(4, 5)
    for model in (alone, made):
        model(x).square().sum().backward()
    want = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    torch.testing.assert_close(clip_grad_norm(made.parameters(), 0.5, mesh), want)
    for mine, true in zip(made.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor)
        torch.testing.assert_close(mine.grad.full_tensor(), true.grad)


def mistakes_are_told(rank: int, size: int) -> None:
    mesh = meshes.make_mesh(Degrees(cp=size))
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    unlike = nn.Parameter(torch.zeros(3))
    unlike.grad = weight.grad * (1 + rank)  # as if the ranks' parts were not summed
    broken = nn.Parameter(torch.zeros(3))
    broken.grad = weight.grad * (torch.nan if rank else 1)
    same = {"parameters": [weight], "max_norm": 1.0, "mesh": mesh}
    # What the last rank passes, where the others pass ``same``.
    cases: list[tuple[dict[str, Any], str]] = [
        ({"max_norm": 0}, "max_norm: got 0, expected a positive number"),
        ({"max_norm": True}, "max_norm: got True, expected a positive number"),
        ({"parameters": [weight, "x"]}, "parameters: got str, expected tensors"),
        ({"parameters": None}, "parameters: got NoneType, expected tensors"),
        ({"parameters": nn.Linear(2, 2)}, "parameters: got Linear, expected tensors"),
        ({"mesh": None}, "mesh: got NoneType, expected one of ringray.make_mesh"),
        ({"mesh": mesh.ring}, "mesh: got ProcessGroup, expected one of"),
        ({"max_norm": 2.0}, "max_norm: 1.0 here|max_norm: 2.0 here"),
        ({"parameters": []}, "gradients: .* here"),
    ]
    for change, says in cases:
        last = rank == size - 1
        with pytest.raises(ValueError, match=says if last or "here" in says else "were refused"):
            clip_grad_norm(**(same | change if last else same))
    for wrong, norms in ((unlike, "1.7.*, 3.4.*, 5.1"), (broken, "1.7.*, nan, nan")):
        for function in (grad_norm, partial(clip_grad_norm, max_norm=1.0)):
            with pytest.raises(ValueError, match=f"plain ones with norms .{norms}.*by rank"):
                function([wrong], mesh=mesh)
    assert float(grad_norm([weight], mesh)) == pytest.approx(3**0.5)
    dist.barrier()
