"""The norm of all gradients of a model on a mesh, and clipping by it.

Each rank holds parts of some gradients (FSDP, TP), all of others, and those of its own stage (PP):
a norm of what one rank holds differs from rank to rank, and clipping by it makes weights diverge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ringray.attention.agreement import AgreedCall, agree, enabled, refusing
from ringray.comm.ring import connect
from ringray.training.mesh import Mesh

_CLOSE = 1e-3  # relative difference of norms of the same gradients; devices may round differently


def grad_norm(parameters: Iterable[Tensor], mesh: Mesh) -> Tensor:
    """Returns the 2-norm of the gradients of a model's parameters over all ranks of ``mesh``; every
    rank calls it after the backward pass.

    Args:
        parameters: of this rank's stage; those without a gradient are left out. Gradients are
            DTensors, as of FSDP2 and TP, or plain tensors, which are whole on each rank: those of a
            replicated model have to be summed over its ranks before.
        mesh: the ranks.

    Returns:
        scalar, plain, the same on every rank; infinite or NaN as gradients are.

    Raises:
        ValueError: on every rank, parameters that are no tensors, a mesh that is not one of
            ``make_mesh``, ranks that disagree, or plain gradients whose norms differ between ranks;
            on a GPU, which no rank waits for, the latter fail in an assertion.
    """
    return clip_grad_norm(parameters, math.inf, mesh)


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, mesh: Mesh) -> Tensor:
    """Multiplies the gradients by max_norm / ``grad_norm``, where this is below 1, in place, as
    ``torch.nn.utils.clip_grad_norm_`` does in one process; returns the norm before.

    Arguments and errors are those of ``grad_norm``; ``max_norm`` is positive.
    """
    comm = connect(None)
    with refusing(comm):
        if not isinstance(mesh, Mesh):
            raise ValueError(f"mesh: got {type(mesh).__name__}, expected one of ringray.make_mesh")
        if type(max_norm) not in (int, float) or not max_norm > 0:
            raise ValueError(f"max_norm: got {max_norm!r}, expected a positive number")
        every: Any = [parameters] if isinstance(parameters, Tensor) else parameters
        every = [*every] if isinstance(every, Iterable) else [every]
        for value in every:
            if not isinstance(value, Tensor):
                what = type(value).__name__
                raise ValueError(f"parameters: got {what}, expected tensors (model.parameters())")
        weights = [weight for weight in every if weight.grad is not None]
        staged = mesh.degrees.pp > 1
        shapes = None if staged else [tuple(weight.shape) for weight in weights]  # of whole tensors
        agree(comm, AgreedCall("clip_grad_norm", max_norm=max_norm, gradients=shapes))
    # DTensors of different meshes, and plain tensors, do not meet in one operation.
    by_mesh: dict[Any, list[Tensor]] = {}
    for weight in weights:
        by_mesh.setdefault(getattr(weight.grad, "device_mesh", None), []).append(weight)
    norms = {
        device_mesh: _whole(get_total_norm([cast("Tensor", weight.grad) for weight in some]))
        for device_mesh, some in by_mesh.items()
    }
    zero = torch.zeros((), dtype=torch.float32, device=mesh.device)
    if enabled() and (staged or None in norms):
        _compare(norms.get(None, zero), mesh)
    # A stage may have no gradient: the others wait for its sum.
    several = [*norms.values()] or [zero]
    total = several[0] if len(several) == 1 else get_total_norm(several)
    if staged:
        squared = total**2
        dist.all_reduce(squared, group=mesh.group("pp"))
        total = squared.sqrt()
    if max_norm < math.inf:
        for some in by_mesh.values():
            clip_grads_with_norm_(some, max_norm, total)
    return total


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _compare(norm: Tensor, mesh: Mesh) -> None:
    """Raises ValueError, on every rank, unless the ranks of each stage have one norm of plain
    gradients: a forgotten sum over ranks makes weights diverge without a trace."""
    comm = connect(None)
    norms = norm.new_empty(comm.world_size, dtype=torch.float64)
    comm.gather([*norms.unbind()], norm.double(), "norms of plain gradients")
    # NaN does not compare, and no norm is negative.
    by_stage = norms.nan_to_num(nan=-1.0)[mesh.whole.mesh].movedim(1, 0).flatten(1)
    most = by_stage.amax(1)
    alike = (most - by_stage.amin(1) <= _CLOSE * most.abs()).all()
    if norms.device.type == "cuda":  # which is not waited for
        torch._assert_async(alike, "clip_grad_norm: norms of plain gradients differ between ranks")
    elif not alike:
        raise ValueError(
            f"gradients: got plain ones with norms {norms.tolist()} by rank, expected the same on "
            "all: sum them over the ranks before (torch.distributed.all_reduce)"
        )
