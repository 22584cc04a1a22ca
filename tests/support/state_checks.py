"""Checks of every rank of a real ring: states of torch that a user sets change no result.

Each function is called on sizes of its own three times: as usual, within a state, and as usual
again, which finds what the state has left in a cache. In between everything cached is forgotten.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ringray
import ringray.nn
from ringray.attention import arguments
from ringray.base import provenance
from ringray.transport import TRANSPORTS
from ringray_kernels import testing
from tests.support.states import STATES, WITHOUT_GRADIENTS

Results = list[Tensor | int | str]
Call = Callable[[], Results]

ROWS, HEADS, KV_HEADS, HEAD_DIM = 37, 4, 2, 16
VOCABULARY = 11
IDS = torch.arange(ROWS)[None] % VOCABULARY
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "alibi_slopes": {"alibi_slopes": [0.5, 0.25, 0.1, 0.01]},
    "distance_bias": {},
    "sinks": {},
    "dropout": {"dropout_p": 0.2, "dropout_seed": 4},
    "documents": {"cu_seqlens": [0, 5, 20, ROWS]},
    "window": {"window": 4, "global_tokens": 2},
    "prefix": {"prefix": 7, "chunk": 9},
    "reference": {"backend": "reference", "softcap": 5.0},
}
# Staged messages are those of a ring, and a double ring needs the number of nodes.
TRANSPORTS_WITHOUT_NUMBERS = [name for name in TRANSPORTS if name not in ("staged", "double-ring")]


# Called at a time when a function mode of the user is meant to change the user's own operators.
OWN_OPERATORS = (
    "ContextParallelAttention", "context_parallel", "sharded_cross_entropy",
    "sharded_linear_cross_entropy", "token_log_probs", "token_entropy", "token_top_k",
)  # fmt: skip


# Public functions: each makes its inputs, and returns a call


def _inputs(seed: int = 0) -> list[Tensor]:
    return [*testing.make_inputs(1, HEADS, KV_HEADS, ROWS, HEAD_DIM, torch.float32, seed=seed)]


def _differentiated(function: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor) -> Call:
    """Returns the call of a function, and of its gradients where they are recorded."""

    def call() -> Results:
        out = function(*leaves)
        if not out.requires_grad:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return call


Layer = tuple[Callable[..., Tensor], list[Tensor], Tensor]  # function, its leaves, gradient of out


def _layer(feature: str, **options: Any) -> Layer:
    *qkv, dout = (ringray.shard(x, dim=2) for x in _inputs())
    learned: dict[str, Tensor] = {}
    if feature == "sinks":
        learned["sinks"] = testing.make_sinks(HEADS, seed=1)
    if feature == "distance_bias":
        learned["distance_bias"] = testing.make_table(HEADS, 3, seed=1)
    leaves = [x.detach().requires_grad_() for x in (*qkv, *learned.values())]
    options |= FEATURES[feature] | {"seq_len": ROWS}

    def function(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        by_name: Any = dict(zip(learned, more, strict=True))
        return ringray.ring_attention(q, k, v, **options, **by_name)

    return function, leaves, dout


def attention(feature: str, **options: Any) -> Call:
    return _differentiated(*_layer(feature, **options))


def kept(feature: str, context_fn: Callable[[], Any], **options: Any) -> Call:
    """Attention in a checkpoint."""
    function, leaves, dout = _layer(feature, **options)

    again = functools.partial(checkpoint, function, use_reentrant=False, context_fn=context_fn)
    return _differentiated(again, leaves, dout)


def eight_bits() -> Call:
    q, k, v, _ = (ringray.shard(x, dim=2) for x in _inputs())
    return torch.no_grad()(lambda: [ringray.ring_attention(q, k, v, quantize="fp8", seq_len=ROWS)])


def decoding(*, prefill: bool) -> Call:
    q, k, v, _ = _inputs()
    dealt = ROWS - 3 if prefill else 0
    shards = [ringray.shard(x[:, :, :dealt], dim=2) for x in (k, v)] if prefill else []

    def call() -> Results:
        outs: Results = []
        if prefill:
            cache = ringray.ShardedKV.of_shards(*shards, capacity=ROWS + 8, seq_len=dealt)
        else:
            cache = ringray.ShardedKV.empty(
                1, KV_HEADS, HEAD_DIM, capacity=ROWS + 8, dtype=torch.float32
            )
        # One token first: a rank has no keys then.
        for start, stop in ((dealt, dealt + 1), (dealt + 1, ROWS)):
            cache.append(k[:, :, start:stop], v[:, :, start:stop])
            with torch.no_grad():
                for mask in ({}, {"window": 1}, {"window": 2, "global_tokens": 1}):
                    outs.append(ringray.ring_decode(q[:, :, start:stop], cache, **mask))  # type: ignore[arg-type]
        cache.crop(cache.length - 1)
        return [*outs, cache.length]

    return call


def appended_later(state: AbstractContextManager[Any]) -> Call:
    """A cache that is made in a state, and used outside of it."""
    q, k, v, _ = _inputs()
    with state:
        cache = ringray.ShardedKV.empty(1, KV_HEADS, HEAD_DIM, capacity=ROWS, dtype=torch.float32)
        cache.append(k[:, :, :5], v[:, :, :5])

    def call() -> Results:
        cache.append(k[:, :, 5:], v[:, :, 5:])
        return [ringray.ring_decode(q[:, :, 5:], cache)]  # type: ignore[list-item]

    return call


def sharding(gradients: str = "sum") -> Call:
    (x, *_), factor = _inputs(), _inputs(1)[0]

    def function(x: Tensor) -> Tensor:
        mine = ringray.shard(x, dim=2, partition="striped", pad_value=3)
        return ringray.unshard(mine, dim=2, partition="striped", gradients=gradients)

    return _differentiated(function, [x.requires_grad_()], factor)


def shifting() -> Call:
    x, *_, dout = (ringray.shard(x, dim=2, partition="striped") for x in _inputs())

    def function(x: Tensor) -> Tensor:
        options: dict[str, Any] = {"seq_len": ROWS, "cu_seqlens": [0, 5, ROWS], "fill": 2}
        return ringray.shift(x, 3, dim=2, partition="striped", **options)

    return _differentiated(function, [x.detach().requires_grad_()], dout)


def of_tokens(name: str) -> Call:
    x = ringray.shard(_inputs()[0][:, 0], dim=1).detach().requires_grad_()
    wanted = ringray.shard(IDS, dim=1, pad_value=-100)
    torch.manual_seed(3)
    head = nn.Linear(HEAD_DIM, VOCABULARY)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        options: dict[str, Any] = {"rows": 4, "temperature": 2.0}
        if name == "token_log_probs":
            return ringray.nn.token_log_probs(x, wanted, head=head, **options)
        if name == "token_entropy":
            return ringray.nn.token_entropy(x, head=head, **options)
        return ringray.nn.token_top_k(x, 3, head=head, **options)[0].sum(-1)

    return _differentiated(function, [x, head.weight], torch.ones(x.shape[:-1]))


def loss(*, linear: bool) -> Call:
    x = ringray.shard(_inputs()[0][:, 0], dim=1).detach().requires_grad_()
    wanted = ringray.shard(IDS, dim=1, pad_value=-100)
    torch.manual_seed(3)
    head = nn.Linear(HEAD_DIM, VOCABULARY)

    def function(x: Tensor, weight: Tensor) -> Tensor:
        if linear:
            return ringray.nn.sharded_linear_cross_entropy(x, head, wanted, rows=4)
        return ringray.sharded_cross_entropy(F.linear(x, weight), wanted)

    return _differentiated(function, [x, head.weight], torch.ones(()))


def layer() -> Call:
    torch.manual_seed(5)
    module = ringray.ContextParallelAttention(HEADS * HEAD_DIM, HEADS, num_kv_heads=KV_HEADS)
    x = ringray.shard(_inputs()[0].transpose(1, 2).flatten(2), dim=1).detach().requires_grad_()
    documents = torch.tensor([0, 5, ROWS])

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return module(x, seq_len=ROWS, cu_seqlens=documents)  # type: ignore[no-any-return]

    return _differentiated(function, [x, *module.parameters()], torch.ones_like(x))


def router() -> Call:
    inputs = _inputs()

    def call() -> Results:
        with (
            torch.no_grad(),
            ringray.context_parallel(buffers=inputs[:3], buffer_dims=(2, 2, 2)) as shards,
        ):
            q, k, v = shards
            return [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)]

    return call


def mesh() -> Results:
    made = ringray.make_mesh(device="cpu")
    return [made.degrees.cp, made.ring.size()]


def strategy() -> Results:
    size = {"ring_size": 2, "seq_len": ROWS, "heads": HEADS, "head_dim": HEAD_DIM}
    return [str(ringray.tuned_strategy(**size))]


FUNCTIONS: Mapping[str, Callable[[], Call]] = {
    **{f"ring_attention {name}": functools.partial(attention, name) for name in FEATURES},
    **{
        f"ring_attention {name}": functools.partial(attention, "softcap", transport=name)
        for name in TRANSPORTS_WITHOUT_NUMBERS
    },
    "ring_attention fp8": eight_bits,
    "ring_decode ShardedKV": functools.partial(decoding, prefill=True),
    "ring_decode ShardedKV empty": functools.partial(decoding, prefill=False),
    "shard unshard": sharding,
    "shard unshard mean": functools.partial(sharding, "mean"),
    "shift": shifting,
    **{
        name: functools.partial(of_tokens, name)
        for name in ("token_log_probs", "token_entropy", "token_top_k")
    },
    "deal": lambda: lambda: [torch.from_numpy(ringray.deal(ROWS, 3, causal=False).token)],
    "local_positions": lambda: lambda: [ringray.local_positions("zigzag-token", ROWS, 3, 1)],
    "next_token_labels": lambda: lambda: [ringray.nn.next_token_labels(IDS, [0, 5, ROWS])],
    "sharded_cross_entropy": functools.partial(loss, linear=False),
    "sharded_linear_cross_entropy": functools.partial(loss, linear=True),
    "ContextParallelAttention": layer,
    "context_parallel": router,
    "keep_attention": functools.partial(kept, "plain", ringray.nn.keep_attention),
    "make_mesh": lambda: mesh,
    "tuned_strategy": lambda: strategy,
}
# Whose results are no tensors, which change a model by torch's own means, or compute elsewhere.
STATELESS = ("Blocks", "offload", "parallelize", "verify")


def forget() -> None:
    """Empties every cache of the library but digests of its files, which take most of a second."""
    arguments._prepared.clear()
    for name, module in [*sys.modules.items()]:
        ours = name.startswith("ringray") and module is not provenance
        for value in [*vars(module).values()] if ours else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def same(got: Results, want: Results, what: str) -> None:
    # A call without gradients returns the result alone.
    for x, y in zip(got, want[: len(got)], strict=True):
        if isinstance(x, Tensor):
            torch.testing.assert_close(
                x, y, atol=2e-6, rtol=2e-6, msg=lambda text, what=what: f"{what}: {text}"
            )
        else:
            assert x == y, what


def states_of(name: str) -> dict[str, Any]:
    """The states in which a function is called: variants of ring_attention take turns."""
    turn, variants = list(FUNCTIONS).index(name), [*FEATURES, *TRANSPORTS_WITHOUT_NUMBERS, "fp8"]
    of_user = name.split()[0] in OWN_OPERATORS
    return {
        state: enter
        for place, (state, enter) in enumerate(STATES.items())
        if not (of_user and state == "function mode")
        and (name.split()[-1] not in variants[1:] or place % 4 == turn % 4)
    }


def functions_in_states(rank: int, size: int) -> None:
    """Each public function gives the same within each state, and after it."""
    for name, prepare in FUNCTIONS.items():
        want = prepare()()
        for state, enter in states_of(name).items():
            what = f"{name}, {state}"
            call = prepare()
            forget()
            try:
                with enter():
                    got = call()
                if state not in WITHOUT_GRADIENTS:
                    assert len(got) == len(want), f"{what}: gradients are missing"
                same(got, want, what)
                same(prepare()(), want, f"{what}, after it")
            except Exception as error:
                raise AssertionError(what) from error


def caches_in_states(rank: int, size: int) -> None:
    """A cache made in any state serves outside of it."""
    want = appended_later(torch.no_grad())()
    for state, enter in STATES.items():
        forget()
        same(appended_later(enter())(), want, state)


# Selective checkpoints

_aten = torch.ops.aten
POLICIES: dict[str, Callable[[Any], bool]] = {
    "products": lambda op: op in (_aten.mm.default, _aten.bmm.default, _aten.addmm.default),
    "flash": lambda op: "flash_attention" in str(op),
    "everything": lambda op: True,
    "nothing": lambda op: False,
}


def _contexts(policy: str) -> Any:
    def decide(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        policy_of_op = POLICIES[policy](op)
        return CheckpointPolicy.MUST_SAVE if policy_of_op else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def checkpointed(rank: int, size: int) -> None:
    """Gradients are those without a checkpoint, bit by bit, whatever a policy keeps."""
    turns = zip(FEATURES, itertools.cycle(TRANSPORTS_WITHOUT_NUMBERS), strict=False)
    for feature, transport in turns:
        want = attention(feature, transport=transport)()
        for policy in POLICIES:
            got = kept(feature, functools.partial(_contexts, policy), transport=transport)()
            alike = all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
            assert alike, f"{transport}, {feature}, {policy}"
