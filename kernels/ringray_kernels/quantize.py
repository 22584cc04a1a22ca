"""q, k and v in 8 bits: e4m3 with a scale for each row of each head.

A scale per row, in place of one per block of rows, follows its row through every cut and order of
a ring. It is a power of two: a number of few bits times it is exact, in bf16 as in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
_LEAST = -64  # exponent of a scale: its inverse stays far from the ends of fp32

Scales = tuple[Tensor, Tensor, Tensor]  # of q (B, Hq, Sq), k and v (B, Hkv, Sk), fp32


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``x`` (B, H, S, D) in e4m3, as bytes (uint8), which all libraries of messages know;
    and the scales (B, H, S), fp32, that it is to be multiplied by, 1 for rows of zeros."""
    largest = x.detach().abs().amax(-1).float()
    exponent = torch.frexp(largest / LARGEST).exponent.clamp(min=_LEAST)
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    return (x.detach() / scale.unsqueeze(-1)).to(DTYPE).view(torch.uint8), scale


def dequantized(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns the inverse of ``quantized``."""
    return x.view(DTYPE).to(dtype).mul_(scale.to(dtype).unsqueeze(-1))
