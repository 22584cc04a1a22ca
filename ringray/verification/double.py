"""fp64 in place of fp32, for an oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ringray.nn import attention
from ringray_kernels import api, checks


@contextmanager
def in_double() -> Iterator[None]:
    """Lets this process compute in fp64 what it computes in fp32: code that asks for float32 by its
    name gets float64. For processes that do nothing else meanwhile."""
    default = torch.get_default_dtype()
    replaced: list[tuple[Any, str, Any]] = [
        (torch, "float32", torch.float64),
        (torch, "float", torch.float64),
        (Tensor, "float", Tensor.double),
        (api, "DTYPES", (torch.float64,)),
        (checks.check_qkv, "__defaults__", ((torch.float64,),)),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    torch.set_default_dtype(torch.float64)
    attention._rotation.cache_clear()
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        torch.set_default_dtype(default)
        attention._rotation.cache_clear()
