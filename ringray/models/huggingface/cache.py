"""``RingCache``: a transformers cache whose keys and values stay sharded over a ring.

Shape legend: B batch, T tokens of a step, Hkv key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ringray.attention.agreement import AgreedCall, agree, refusing
from ringray.attention.sharded_kv import ShardedKV
from ringray.comm.ring import connect
from ringray.models.huggingface.ring import CACHE, Ring, digest


class RingCache(Cache):
    """Transformers' cache of a model whose layers hold ``ShardedKV``; for ``generate``.

    The first forward, on the shards of ``ring``, fills it; later ones append the tokens that they
    are given, the same on every rank. ``batch``: sequences. ``capacity``: tokens over all ranks.
    """

    def __init__(self, ring: Ring, batch: int, capacity: int) -> None:
        super().__init__(layer_class_to_replicate=partial(_Layer, ring, capacity))
        self.ring, self.batch = ring, batch

    def step(self, arguments: dict[str, Any], model: nn.Module) -> dict[str, Any]:
        """Returns the arguments of a forward on new tokens, on which all ranks agree."""
        comm, ids = connect(self.ring.group), arguments.get("input_ids")
        with refusing(comm):
            if not isinstance(ids, Tensor):
                raise ValueError("input_ids: got none, expected the tokens of a step")
            if len(ids) != self.batch:
                raise ValueError(
                    f"num_beams: got {len(ids)} sequences for a cache of {self.batch}, expected "
                    "greedy search or sampling, of one sequence for each prompt"
                )
            mask = arguments.get("attention_mask")
            if isinstance(mask, Tensor) and not mask.bool().all():
                raise ValueError(
                    "attention_mask: it masks some tokens, expected prompts of one length without "
                    "padding: a ring masks by causality and sliding window only"
                )
        length = self.get_seq_length() + ids.shape[1]
        step = {"model": type(model).__name__, "length": length, "input_ids": digest(ids)}
        agree(comm, AgreedCall("a step of generate", **step))
        ring = replace(self.ring, seq_len=length, last_position=length - 1, cu_seqlens=None)
        return {**arguments, "attention_mask": None, "ring": ring}


class _Layer(CacheLayerMixin):
    """The keys and values of one layer."""

    def __init__(self, ring: Ring, capacity: int) -> None:
        super().__init__()
        self._ring, self._capacity = ring, capacity
        self._held: ShardedKV | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        options = {"capacity": self._capacity, **self._ring.layout}
        self._held = ShardedKV.of_shards(key_states, value_states, **options)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keeps keys and values (B, Hkv, T, D); the returned keys lead ``attend`` to all of
        them."""
        if self._held is None:
            self.lazy_initialization(key_states, value_states)
        else:
            self._held.append(key_states, value_states)
            setattr(key_states, CACHE, self._held)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the keys that a mask spans: none but the new ones; the ring masks the others."""
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0 if self._held is None else self._held.length

    def get_max_length(self) -> int:
        return self._capacity

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ValueError("num_beams: a ring's cache is not reordered, expected greedy or sampling")

    def reset(self) -> None:
        raise ValueError("past_key_values: a ring's cache is filled once; make another")
