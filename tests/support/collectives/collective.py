"""Calls of a function that communicates, and ways in which a call fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

ROWS, HIDDEN, VOCABULARY = 4, 16, 10
Calls = dict[str, Callable[[], Any]]


class Collective(NamedTuple):
    """``right`` makes a call of a function; ``wrong`` are calls of one rank, by what its error
    says; ``other`` are calls that the ranks disagree about, by what all errors say."""

    right: Callable[[], Any]
    wrong: Calls
    other: Calls


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this rank is broken")


def while_broken(target: Any, name: str, call: Callable[[], Any]) -> Any:
    """Makes a call while an attribute, of which its own computation needs the call, fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, broken)
        return call()


def in_vmap(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    return torch.vmap(call)(x[None].expand(2, *x.shape))


def faked(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    with FakeTensorMode() as mode:
        return call(mode.from_tensor(x))


def compiled(call: Callable[..., Any], *args: Any) -> Any:
    return torch.compile(call, fullgraph=True, backend="aot_eager")(*args)


def distributed(x: Tensor) -> Tensor:
    mesh = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)
