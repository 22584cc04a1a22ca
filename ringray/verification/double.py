"""fp64 in place of fp32, for an oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from ringray.nn import attention
from ringray_kernels import api, checks

# Products of tokens with the weights of their experts; PyTorch has none in fp64.
_GROUPED = (F, "grouped_mm"), (torch, "_grouped_mm")


def _grouped_mm(x: Tensor, weight: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    """Returns the products of rows (S, K) with one of the weights (E, K, N) each, (S, N); ``offs``:
    (E,) where the rows of each weight end."""
    ends = [0, *offs.tolist(), len(x)]
    parts = x.split([end - begin for begin, end in pairwise(ends)])
    # Rows behind the last end are of no expert.
    products = [rows @ some for rows, some in zip(parts, weight, strict=False)]
    return torch.cat([*products, x.new_zeros(len(parts[-1]), weight.shape[-1])])


@contextmanager
def in_double() -> Iterator[None]:
    """Lets this process compute in fp64 what it computes in fp32: code that asks for float32 by its
    name gets float64. For processes that do nothing else meanwhile."""
    replaced: list[tuple[Any, str, Any]] = [
        (torch, "float32", torch.float64),
        (torch, "float", torch.float64),
        (Tensor, "float", Tensor.double),
        (api, "DTYPES", (torch.float64,)),
        (checks.check_qkv, "__defaults__", ((torch.float64,),)),
        *((owner, name, _grouped_mm) for owner, name in _GROUPED if hasattr(owner, name)),
    ]
    with ExitStack() as restored:
        for owner, name, value in replaced:
            restored.enter_context(patch.object(owner, name, value))
        restored.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        attention._rotation.cache_clear()
        restored.callback(attention._rotation.cache_clear)
        yield
