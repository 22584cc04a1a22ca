"""Modules and losses on sharded sequences.

attention  ``ContextParallelAttention``
loss       cross entropy over shards
tokens     log-probabilities, entropy and likeliest tokens of shards
"""

from __future__ import annotations

from ringray.attention.compile import keep_attention
from ringray.nn.attention import ContextParallelAttention
from ringray.nn.loss import next_token_labels, sharded_cross_entropy, sharded_linear_cross_entropy
from ringray.nn.tokens import token_entropy, token_log_probs, token_top_k

__all__ = [
    "ContextParallelAttention",
    "keep_attention",
    "next_token_labels",
    "sharded_cross_entropy",
    "sharded_linear_cross_entropy",
    "token_entropy",
    "token_log_probs",
    "token_top_k",
]
