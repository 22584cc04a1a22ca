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

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.comm.ring import connect
from ringray.training.mesh import Mesh


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
        ValueError: on every rank, parameters that are no tensors, or ranks that disagree.
    """
    return _norm(parameters, mesh, "grad_norm")[0]


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, mesh: Mesh) -> Tensor:
    """Multiplies the gradients by max_norm / ``grad_norm``, where this is below 1, in place, as
    ``torch.nn.utils.clip_grad_norm_`` does in one process; returns the norm before.

    Arguments and errors are those of ``grad_norm``; ``max_norm`` is positive.
    """
    total, groups = _norm(parameters, mesh, "clip_grad_norm", max_norm)
    for weights in groups:
        clip_grads_with_norm_(weights, max_norm, total)
    return total


def _norm(
    parameters: Iterable[Tensor], mesh: Mesh, function: str, max_norm: float = math.inf
) -> tuple[Tensor, list[list[Tensor]]]:
    """Returns the norm, and the parameters with gradients, those of one DeviceMesh together."""
    comm, staged = connect(None), mesh.degrees.pp > 1
    with refusing(comm):
        if not isinstance(max_norm, int | float) or not max_norm > 0:
            raise ValueError(f"max_norm: got {max_norm!r}, expected a positive number")
        every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for value in every:
            if not isinstance(value, Tensor):
                raise ValueError(f"parameters: got {type(value).__name__}, expected tensors")
        weights = [weight for weight in every if weight.grad is not None]
        shapes = None if staged else [tuple(weight.shape) for weight in weights]  # of whole tensors
        agree(comm, AgreedCall(function, max_norm=max_norm, gradients=shapes))
    # DTensors of different meshes, and plain tensors, do not meet in one operation.
    by_mesh: dict[Any, list[Tensor]] = {}
    for weight in weights:
        by_mesh.setdefault(getattr(weight.grad, "device_mesh", None), []).append(weight)
    groups = [*by_mesh.values()]
    norms = [_whole(get_total_norm([cast("Tensor", x.grad) for x in some])) for some in groups]
    # A stage may have no gradient: the others wait for its sum.
    zero = torch.zeros((), dtype=torch.float32, device=mesh.device)
    total = norms[0] if len(norms) == 1 else get_total_norm(norms) if norms else zero
    if staged:
        squared = total**2
        dist.all_reduce(squared, group=mesh.group("pp"))
        total = squared.sqrt()
    return total, groups


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
