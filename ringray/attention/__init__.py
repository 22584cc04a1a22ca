"""Exact ring attention as one differentiable operation.

op         ``ring_attention``, the public function
arguments  validated arguments of one call
open_options options that a call leaves open: the tuned choice
per_head   tensor arguments beside q, k and v
other_names keywords of other libraries, answered with ours
agreement  exchange in which ranks compare their arguments
problem    one rank's part of a call: layout, mask, script
compile    the operation as torch.compile and autograd see it
loops      computation beside messages: ring, gather, heads
sharding   ``shard``, ``unshard`` and ``local_positions``
sharded_kv ``ShardedKV``, keys and values of a long context, for decoding
decode     ``ring_decode``, attention of new tokens to such a context
"""

from __future__ import annotations

from ringray.attention.op import ring_attention

__all__ = ["ring_attention"]
