"""ringray: exact attention over sequences too long for one GPU, and the platform that measures it.

The library side (this namespace) needs torch only; importing ``ringray`` imports nothing heavy:
each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringray.attention import ring_attention
    from ringray.attention.deal import deal
    from ringray.attention.decode import ring_decode
    from ringray.attention.sharded_kv import ShardedKV
    from ringray.attention.sharding import local_positions, shard, unshard
    from ringray.attention.shift import shift
    from ringray.models.sdpa import context_parallel
    from ringray.nn import ContextParallelAttention, sharded_cross_entropy
    from ringray.training.mesh import make_mesh
    from ringray.training.offload import offload
    from ringray.training.parallelize import parallelize
    from ringray.tuning.lookup import tuned_strategy
    from ringray.verification import verify
    from ringray_kernels.config import Blocks

__version__ = "0.1.0"
__all__ = [
    "Blocks",
    "ContextParallelAttention",
    "ShardedKV",
    "context_parallel",
    "deal",
    "local_positions",
    "make_mesh",
    "offload",
    "parallelize",
    "ring_attention",
    "ring_decode",
    "shard",
    "sharded_cross_entropy",
    "shift",
    "tuned_strategy",
    "unshard",
    "verify",
]

_HOME = {
    "Blocks": "ringray_kernels.config",
    "ContextParallelAttention": "ringray.nn",
    "ShardedKV": "ringray.attention.sharded_kv",
    "context_parallel": "ringray.models.sdpa",
    "deal": "ringray.attention.deal",
    "local_positions": "ringray.attention.sharding",
    "make_mesh": "ringray.training.mesh",
    "offload": "ringray.training.offload",
    "parallelize": "ringray.training.parallelize",
    "ring_attention": "ringray.attention",
    "ring_decode": "ringray.attention.decode",
    "shard": "ringray.attention.sharding",
    "sharded_cross_entropy": "ringray.nn",
    "shift": "ringray.attention.shift",
    "tuned_strategy": "ringray.tuning.lookup",
    "unshard": "ringray.attention.sharding",
    "verify": "ringray.verification",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ringray' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
