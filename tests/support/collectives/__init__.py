"""Calls of every public function that communicates, by name: right ones and one rank's mistakes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.support.collectives import attending, losses, sequences, training
from tests.support.collectives.collective import Collective

COLLECTIVES: dict[str, Callable[[], Collective]] = {
    "ContextParallelAttention": attending.module,
    "ShardedKV": attending.decoding,
    "context_parallel": attending.routing,
    "make_mesh": training.meshes,
    "offload": training.offloading,
    "parallelize": training.sharded_models,
    "ring_attention": attending.attention,
    "ring_decode": attending.decoding,
    "sharded_cross_entropy": losses.plain_loss,
    "sharded_linear_cross_entropy": losses.linear_loss,
    "shift": sequences.shifting,
    "unshard": sequences.unsharding,
    **{f"token_{name}": partial(losses.of_tokens, f"token_{name}") for name in losses.OF_TOKENS},
    "backward of shift": sequences.backward_of_shift,
    "backward of unshard": sequences.backward_of_unshard,
}
