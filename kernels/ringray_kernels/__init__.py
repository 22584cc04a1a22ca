"""ringray_kernels: one rank's part of ring attention, on interval masks.

``forward`` and ``backward`` compute attention in which each query row sees one contiguous range of
key rows, merged with what earlier hops found. Needs torch (and triton for that backend) only;
importing this package imports neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringray_kernels.api import State, backward, delta, forward
    from ringray_kernels.config import BlockConfig, Blocks

__all__ = ["BlockConfig", "Blocks", "State", "backward", "delta", "forward"]


def __getattr__(name: str) -> object:
    if name in __all__:
        home = "config" if name in ("BlockConfig", "Blocks") else "api"
        return getattr(importlib.import_module(f"ringray_kernels.{home}"), name)
    raise AttributeError(f"module 'ringray_kernels' has no attribute {name!r}")
