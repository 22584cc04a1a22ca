"""ringray: exact attention over sequences too long for one GPU, and the platform that measures it.

The library side (this namespace) needs torch only; importing ``ringray`` imports nothing heavy:
each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringray.attention import ring_attention
    from ringray.sharding import local_positions, shard, unshard
    from ringray_kernels.config import Blocks

__version__ = "0.1.0"
__all__ = ["Blocks", "local_positions", "ring_attention", "shard", "unshard"]

_HOME = {
    "Blocks": "ringray_kernels.config",
    "local_positions": "ringray.sharding",
    "ring_attention": "ringray.attention",
    "shard": "ringray.sharding",
    "unshard": "ringray.sharding",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ringray' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
