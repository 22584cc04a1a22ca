"""Decode: the time of new tokens, with a context whose keys and values stay sharded.

A repeat is one step: every rank appends the keys and values of ``new_tokens`` tokens to its cache
and attends with their queries, which are the last of ``seq_len`` positions; the cache then forgets
them. The baseline is PyTorch's SDPA over the whole context on rank 0, in turns with it. It gets
the query heads of a group as rows of one head, so that it too reads each key once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ringray.attention.decode import ring_decode
from ringray.attention.sharded_kv import ShardedKV
from ringray.lab.kinds import latency
from ringray.lab.kinds.base import RankContext, drawn
from ringray.lab.trial.config import TrialConfig
from ringray.lab.trial.measurement import RankReport
from ringray.partition import padded_length


def run(config: TrialConfig, context: RankContext) -> RankReport:
    """Measures one trial on this rank; every rank of the ring calls it at the same time."""
    problem = config.problem
    assert problem.new_tokens is not None
    assert not isinstance(problem.window, tuple), "pruned"
    window = problem.window
    dealt = problem.seq_len - problem.new_tokens
    rows = padded_length(config.partition, dealt, config.ring.size) // config.ring.size
    with context.agreed():
        cache = ShardedKV.of_shards(
            *_drawn(config, context, rows, 5 + 2 * context.rank, *2 * [problem.kv_heads]),
            capacity=problem.seq_len,
            partition=config.partition,
            seq_len=dealt,
            group=context.group,
        )
        heads = (problem.heads, problem.kv_heads, problem.kv_heads)
        q, k, v = _drawn(config, context, problem.new_tokens, 0, *heads)

    def step() -> None:
        cache.crop(dealt)
        cache.append(k, v)
        ring_decode(
            q,
            cache,
            group=context.group,
            window=window,
            global_tokens=problem.global_tokens,
            backend=config.strategy.backend,
        )

    return latency.measure(config, context, (q, k, v, *cache.buffers), step, alone=_alone)


def _drawn(
    config: TrialConfig, context: RankContext, rows: int, salt: int, *heads: int
) -> list[Tensor]:
    """Returns tensors (B, H, rows, D), one for each H of ``heads``."""
    shapes = [(config.problem.batch, count, rows, config.problem.head_dim) for count in heads]
    return [drawn(config, context, shape, salt + number) for number, shape in enumerate(shapes)]


def _alone(config: TrialConfig, context: RankContext) -> Callable[[], float] | None:
    """Returns a function that times SDPA over all keys that new tokens see, on rank 0; None on the
    other ranks, which call this too."""
    problem = config.problem
    tokens, group = problem.new_tokens, problem.heads // problem.kv_heads
    assert tokens is not None
    assert not isinstance(problem.window, tuple), "pruned"
    with context.agreed():
        if context.rank:
            return None
        (q,) = _drawn(config, context, tokens, 0, problem.heads)
        q = q.unflatten(1, (problem.kv_heads, group)).transpose(2, 3).flatten(2, 3)
        window = problem.seq_len if problem.window is None else problem.window
        first, everyone = max(0, problem.seq_len - tokens - window), problem.global_tokens or 0
        keys = torch.arange(problem.seq_len)
        keys = keys[(keys >= first) | (keys < everyone)]
        k, v = _drawn(config, context, len(keys), 3, problem.kv_heads, problem.kv_heads)
        mask = None
        if tokens > 1:
            positions = torch.arange(problem.seq_len - tokens, problem.seq_len).repeat_interleave(
                group
            )
            seen = (keys >= positions[:, None] - window) | (keys < everyone)
            seen &= keys <= positions[:, None]
            mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
            mask = mask.to(context.device)

    def work() -> None:
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return latency.timed_alone(config, context, work)
