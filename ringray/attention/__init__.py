"""Exact ring attention as one differentiable operation.

op         ``ring_attention``, the public function
call       a call as records: ``Call(mask, score, strategy)``
documents  boundaries of packed documents, as callers give them
tensor_arguments  tensors beside q, k and v
arguments  the arguments of a call, checked and resolved
open_choices  choices that a call leaves open: the tuned one
other_names keywords of other libraries, answered with ours
deal       ``deal``, the rows of every rank for a mask
agreement  exchange in which ranks compare their arguments
problem    one rank's part of a call: layout, call, script
compile    the operation as torch.compile and autograd see it
loops      computation beside messages: ring, gather, heads
sharding   ``shard``, ``unshard`` and ``local_positions``
shift      ``shift``, rows of tokens some places on
sharded_kv ``ShardedKV``, keys and values of a long context, for decoding
decode     ``ring_decode``, attention of new tokens to such a context
"""

from __future__ import annotations

from ringray.attention.op import ring_attention

__all__ = ["ring_attention"]
