"""Attention: the op, its module, decoding and the router."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ringray
from tests.support.collectives.collective import (
    HIDDEN,
    ROWS,
    Calls,
    Collective,
    broken,
    compiled,
    distributed,
    faked,
    in_vmap,
    while_broken,
)


def attention() -> Collective:
    x = torch.randn(1, 2, ROWS, HIDDEN)
    run = ringray.ring_attention
    asked = partial(run, x, x, x)
    wrong: Calls = {
        "q: got int, expected a tensor": partial(run, 3, x, x),  # type: ignore[arg-type]
        "k: got 3 rows": partial(run, x, x[:, :, 1:], x[:, :, 1:]),
        "layout torch.sparse": partial(run, x.to_sparse(), x, x),
        "expected a plain, dense": lambda: run(distributed(x), x, x),
        "no backend computes|tensors on meta": partial(run, *[x.to("meta")] * 3),
        "window: got -1": partial(asked, window=-1),
        "window: got True": partial(compiled, lambda x: run(x, x, x, window=True), x),
        "'fp8' where gradients are needed": partial(
            run, x.clone().requires_grad_(), x, x, quantize="fp8"
        ),
        "cu_seqlens: ": partial(asked, cu_seqlens=torch.tensor([0, 3])),
        "alibi_slopes: got nan": partial(asked, alibi_slopes=[math.nan] * 2),
        "attn_bias: got .* expected None or a": partial(asked, attn_bias=torch.zeros(1, 2, 4, 11)),
        "ringray calls it causal": partial(asked, is_causal=True),
        "missing 1 required .*'v'": partial(run, x, x),
        "a FakeTensor|FakeTensors": partial(faked, lambda x: run(x, x, x), x),
        "a transform of": lambda: torch.func.grad(lambda x: run(x, x, x).sum())(x),
        "of torch.func or": partial(in_vmap, lambda x: run(x, x, x), x),
        "or forward-mode AD": partial(torch.func.jvp, lambda x: run(x, x, x), (x,), (x,)),
        "inference mode": partial(run, inferred(x), x.clone().requires_grad_(), x),
        "rank is broken": partial(
            while_broken, ringray.attention.arguments, "Layout", lambda: run(x, x, x, scale=0.5)
        ),
    }
    return Collective(asked, wrong, other_attention(x))


def inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def other_attention(x: Tensor) -> Calls:
    """Returns a call for each value on which ranks agree, which differs in it."""
    run = ringray.ring_attention
    options: dict[str, dict[str, Any]] = {
        "seq_len": {"seq_len": 7},
        "causal": {"causal": False},
        "window": {"window": 3},
        "chunk": {"chunk": 3},
        "prefix": {"prefix": 3},
        "global_tokens": {"window": 3, "global_tokens": 2},
        "shared_prefix": {"window": 3, "shared_prefix": 2},
        "cu_seqlens": {"cu_seqlens": [0, 3, 12]},
        "scale": {"scale": 0.3},
        "softcap": {"softcap": 5.0},
        "sinks": {"sinks": torch.zeros(2)},
        "alibi_slopes": {"alibi_slopes": [0.5] * 2},
        "distance_bias": {"distance_bias": torch.zeros(2, 3)},
        "attn_bias": {"attn_bias": torch.zeros(1, 2, 4, 12)},
        "quantized": {"quantize": "fp8"},
        "dropout_seed": {"dropout_p": 0.5, "dropout_seed": 3},
        "partition": {"partition": "striped"},
        "transport": {"transport": "bidirectional"},
        "backward": {"backward": "query-side"},
        "backend": {"backend": "reference"},
        "blocks": {"blocks": 64},
    }
    tensors = {
        "batch": [x.repeat(2, 1, 1, 1)] * 3,
        "heads": [x.repeat(1, 2, 1, 1)] * 3,
        "head_dim": [x[..., :8]] * 3,
        "value_dim": [x, x, x[..., :8]],
        "dtype": [x.half()] * 3,
        "requires_grad": [x.clone().requires_grad_(), x, x],
    }
    return {
        **{f"{name}: ": partial(run, x, x, x, **arguments) for name, arguments in options.items()},
        **{f" {name}: ": partial(run, *changed) for name, changed in tensors.items()},
        "disagree about what they do": partial(ringray.unshard, x, dim=2),
    }


def module() -> Collective:
    x = torch.randn(1, ROWS, HIDDEN)
    run = ringray.ContextParallelAttention(HIDDEN, 2)
    hooked = ringray.ContextParallelAttention(HIDDEN, 2)
    hooked.k_proj.register_forward_hook(broken)
    wrong: Calls = {
        r"x: got shape \(1, 4, 15\)": partial(run, x[..., 1:]),
        "seq_len: ": partial(run, x, seq_len=3),
        "seq_len: got": partial(compiled, partial(run, seq_len=-5), x),
        "cu_seqlens: expected boundaries": partial(run, x, cu_seqlens=torch.tensor([0, 3])),
        "rank is broken": partial(hooked, x),
    }
    chunked = ringray.ContextParallelAttention(HIDDEN, 2, chunk=2)
    return Collective(partial(run, x), wrong, {"chunk: ": partial(chunked, x)})


def decoding() -> Collective:
    x = torch.randn(1, 2, 1, HIDDEN)

    def filled(**others: Any) -> ringray.ShardedKV:
        sizes = {"batch": 1, "kv_heads": 2, "head_dim": HIDDEN, "capacity": 8} | others
        cache = ringray.ShardedKV.empty(**sizes, dtype=torch.float32)
        cache.append(x, x)
        return cache

    run = ringray.ring_decode
    three = torch.randn(1, 2, 3, HIDDEN)
    wrong: Calls = {
        "q: got torch.int32": lambda: run(x.int(), filled()),
        "q: got .*bfloat16|k: got .*float32": lambda: run(x.bfloat16(), filled()),
        "q: got 3 tokens, expected at most the 1": lambda: run(three, filled()),
        "q: got shape .*expected batch 1 and head dim 16": lambda: run(x[..., :4], filled()),
        "q: got a tensor that requires a gradient": lambda: run(
            x.clone().requires_grad_(), filled()
        ),
        "expected a ShardedKV": lambda: run(x, x),  # type: ignore[arg-type]
        "window: got -1": lambda: run(x, filled(), window=-1),
        "global_tokens: got 4 without window": lambda: run(x, filled(), global_tokens=4),
        "softcap: got 0": lambda: run(x, filled(), softcap=0),
        "keyword 'alibi_slopes'; .* no scores are biased": lambda: run(
            x, filled(), alibi_slopes=[1.0]
        ),
        "capacity: got 0": lambda: filled(capacity=0),
        "capacity: got 3 tokens beyond 1, expected at most 1": lambda: filled(capacity=2).append(
            three, three
        ),
        "position: got 7, expected 1": lambda: filled().append(x, x, position=7),
        "v: got .*expected .1, 2, 1, 16": lambda: filled().append(x, three),
        "expected .* as the cache holds": lambda: filled().append(x.half(), x),
    }

    def longer() -> ringray.ShardedKV:
        cache = filled()
        cache.append(x, x)
        return cache

    other: Calls = {
        "capacity: ": lambda: run(x, filled(capacity=9)),
        "length: ": lambda: run(x, longer()),
        "new_tokens: ": lambda: run(x.repeat(1, 1, 2, 1), longer()),
        "heads: ": lambda: run(x.repeat(1, 2, 1, 1), filled()),
        "scale: ": lambda: run(x, filled(), scale=2.0),
        "window: ": lambda: run(x, filled(), window=3),
        "global_tokens: ": lambda: run(x, filled(), window=3, global_tokens=2),
        "backend: ": lambda: run(x, filled(), backend="reference"),
    }
    return Collective(lambda: run(x, filled()), wrong, other)


def routing() -> Collective:
    x = torch.randn(1, 2, ROWS, HIDDEN)

    def run(call: Callable[[], Any] | None = None, **options: Any) -> Any:
        with ringray.context_parallel(**options):
            return call() if call else F.scaled_dot_product_attention(x, x, x)

    def attended(*args: Any, **options: Any) -> Any:
        return run(partial(F.scaled_dot_product_attention, *args, **options))

    few = x[:, :, :2]
    wrong: Calls = {
        "partition: got 'zag'": partial(run, partition="zag"),
        "got attn_mask, expected none": partial(attended, x, x, x, torch.ones(ROWS, ROWS).bool()),
        "dropout_p: got 1.0": partial(attended, x, x, x, dropout_p=1.0),
        "4 query rows and 2": partial(attended, x, few, few),
        "2 query heads and 1 key": partial(attended, x, x[:, :1], x[:, :1]),
        r"query \(2, 4, 16\), expected": partial(attended, x[0], x[0], x[0]),
        "pad_value: got 300": partial(
            run, buffers=[torch.zeros(3).byte()], buffer_dims=[0], pad_values=300
        ),
        "never called": partial(run, lambda: x),
    }
    return Collective(run, wrong, {"partition: ": partial(run, partition="contiguous")})
