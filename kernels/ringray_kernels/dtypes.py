"""Element types of q, k, v and the results: one table for specs, predictions and kernels.

To add one, add its row here and its rates to ``ringray/lab/predict/cost_model.py``; a backend that
cannot compute it says so in ``unsupported``. Imports torch only for :func:`torch_dtype`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Dtype:
    """An element type. ``name``: the attribute of torch; ``short``: the alias in specs and the
    text in tables; ``itemsize``: bytes per element."""

    name: str
    short: str
    itemsize: int


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("float32", "fp32", 4),
        Dtype("bfloat16", "bf16", 2),
        Dtype("float16", "fp16", 2),
    )
}


def torch_dtype(name: str) -> torch.dtype:
    """Returns torch's object for the element type ``name``."""
    import torch

    return getattr(torch, DTYPES[name].name)
