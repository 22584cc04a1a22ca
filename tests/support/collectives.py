"""Calls of every public function that communicates, by name: right ones and one rank's mistakes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import ringray
import ringray.attention.shift
import ringray.nn
from ringray.models.sizes import named
from ringray.training import checkpoint, trainer
from ringray.training.corpus import RandomTokens
from ringray.training.recipe import Degrees, Recipe

Calls = dict[str, Callable[[], Any]]

ROWS, HIDDEN, VOCABULARY = 4, 16, 10
TINY = named("llama-tiny", {})


class Collective(NamedTuple):
    """``right`` makes a call of a function; ``wrong`` are calls of one rank, by what its error
    says; ``other`` are calls that the ranks disagree about, by what all errors say."""

    right: Callable[[], Any]
    wrong: Calls
    other: Calls


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this rank is broken")


def while_broken(target: Any, name: str, call: Callable[[], Any]) -> Any:
    """Makes a call while an attribute, of which its own computation needs the call, fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, broken)
        return call()


def in_vmap(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    return torch.vmap(call)(x[None].expand(2, *x.shape))


def faked(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    with FakeTensorMode() as mode:
        return call(mode.from_tensor(x))


def compiled(call: Callable[..., Any], *args: Any) -> Any:
    return torch.compile(call, fullgraph=True, backend="aot_eager")(*args)


def loss_of(run: Callable[..., Any], values: Tensor, name: str) -> Collective:
    labels = torch.ones(1, ROWS, dtype=torch.int64)
    far = labels.clone()
    far[0, 2] = VOCABULARY
    wrong: Calls = {
        "labels: got 10, expected 0 to 9": partial(run, values, far),
        r"labels: got torch.int64 of shape \(1, 3\)": partial(run, values, labels[:, 1:]),
        "labels: got torch.float32": partial(run, values, labels.float()),
        f"{name}: got torch.int64": partial(run, values.long(), labels),
        "ignore_index: got -100, .* torch.uint8": partial(run, values, labels.byte()),
        "gradients: got 'most'": partial(run, values, labels, gradients="most"),
        "vmap": partial(in_vmap, partial(run, labels=labels), values),
        "a FakeTensor|FakeTensors": partial(faked, partial(run, labels=labels), values),
        "cannot send tensors of meta": partial(run, values.to("meta"), labels.to("meta")),
        "rank is broken": partial(while_broken, F, "cross_entropy", partial(run, values, labels)),
        "labels: got 10, expected 0": partial(compiled, run, values, far),
    }  # fmt: skip
    other: Calls = {
        "ignore_index: ": partial(run, values, labels, ignore_index=3),
        "gradients: ": partial(run, values, labels, gradients="mean"),
        "dtype: ": partial(run, values.double(), labels),
        "disagree about what they do": partial(ringray.unshard, values, dim=1),
    }
    return Collective(partial(run, values, labels), wrong, other)


def plain_loss() -> Collective:
    rows = torch.randn(1, ROWS, VOCABULARY)
    collective = loss_of(ringray.sharded_cross_entropy, rows, "logits")
    labels = torch.ones(1, ROWS, dtype=torch.int64)
    narrow = partial(ringray.sharded_cross_entropy, rows[..., :4], labels)
    return collective._replace(
        other={**collective.other, "features: 10 here|features: 4 here": narrow}
    )


def linear_loss() -> Collective:
    head = nn.Linear(HIDDEN, VOCABULARY)

    def run(x: Any, labels: Any, **others: Any) -> Tensor:
        own = head.to(x.dtype) if x.device.type == "cpu" and x.is_floating_point() else head
        if x.device.type == "meta":
            own = nn.Linear(HIDDEN, VOCABULARY, device="meta")
        return ringray.nn.sharded_linear_cross_entropy(x, own, labels, rows=3, **others)

    values = torch.randn(1, ROWS, HIDDEN)
    loss = loss_of(run, values, "x")
    labels = torch.ones(1, ROWS, dtype=torch.int64)
    wrong = {
        **loss.wrong,
        r"x: got torch.float32 of shape \(1, 16\)": partial(run, values[:, 0], labels[:, 0]),
        "rows: got 0": partial(
            ringray.nn.sharded_linear_cross_entropy, values, head.float(), labels, rows=0
        ),
    }
    plain = partial(ringray.sharded_cross_entropy, values, labels)
    return loss._replace(
        wrong=wrong, other={**loss.other, "sharded_linear_cross_entropy.*there": plain}
    )


def unsharding() -> Collective:
    x = torch.randn(2, ROWS, 3)
    run = partial(ringray.unshard, dim=1)
    wrong: Calls = {
        "dim: got 3": partial(ringray.unshard, x, dim=3),
        "of layout": lambda: run(distributed(x)),
        "dim: got 4": lambda: compiled(lambda x: ringray.unshard(x, dim=4), x),
        "partition: got 'zag'": partial(run, x, partition="zag"),
        "plain, dense": partial(run, x.to_sparse()),
        "cannot send tensors of meta": partial(run, x.to("meta")),
        "vmap": partial(in_vmap, run, x),
        "a FakeTensor|FakeTensors": partial(faked, run, x),
        "rank is broken": partial(
            while_broken, ringray.attention.sharding, "_rows", partial(run, x)
        ),
    }  # fmt: skip
    other: Calls = {
        "dtype: ": partial(run, x.double()),
        "shape: ": partial(run, x[..., :2]),
        "requires_grad: ": partial(run, x.clone().requires_grad_()),
        "gradients: ": partial(run, x, gradients="mean"),
        "rows_per_rank: ": partial(run, x[:, :2]),
        "seq_len: ": partial(run, x, seq_len=3 * ROWS - 1),
        "partition: ": partial(run, x, partition="striped"),
    }
    return Collective(partial(run, x), wrong, other)


def shifting() -> Collective:
    x = torch.randn(2, ROWS, 3)
    run = partial(ringray.shift, by=1, dim=1)
    wrong: Calls = {
        "dim: got 3": partial(ringray.shift, x, 1, dim=3),
        "by: got 1.5": partial(ringray.shift, x, 1.5, dim=1),  # type: ignore[arg-type]
        "fill: got 300": partial(ringray.shift, x.byte(), 1, dim=1, fill=300),
        "cu_seqlens: expected boundaries": partial(run, x, cu_seqlens=[0, 3]),
        "cu_seqlens: got 3": partial(run, x, cu_seqlens=3),
        "seq_len: ": partial(run, x, seq_len=5),
        "of layout": lambda: run(distributed(x)),
        "dim: got 4": lambda: compiled(lambda x: ringray.shift(x, 1, dim=4), x),
        "partition: got 'zag'": partial(run, x, partition="zag"),
        "cannot send tensors of meta": partial(run, x.to("meta")),
        "vmap": partial(in_vmap, run, x),
        "a FakeTensor|FakeTensors": partial(faked, run, x),
        "rank is broken": partial(while_broken, ringray.attention.shift, "_bytes", partial(run, x)),
    }  # fmt: skip
    other: Calls = {
        "by: ": partial(ringray.shift, x, 2, dim=1),
        "dtype: ": partial(run, x.double()),
        "shape: ": partial(run, x[..., :2]),
        "requires_grad: ": partial(run, x.clone().requires_grad_()),
        "fill: ": partial(run, x, fill=1),
        "seq_len: ": partial(run, x, seq_len=3 * ROWS - 1, partition="striped"),
        "cu_seqlens: ": partial(run, x, cu_seqlens=[0, 3, 12]),
        "partition: ": partial(run, x, partition="striped"),
    }
    return Collective(partial(run, x), wrong, other)


def backward_of_shift() -> Collective:
    def run(name: str | None = None) -> None:
        moved = ringray.shift(torch.randn(2, ROWS, 3).requires_grad_(), 1, dim=1)
        backward = moved.sum().backward
        target = ringray.attention.shift
        while_broken(target, name, backward) if name else backward()

    return Collective(run, {"rank is broken": partial(run, "_bytes")}, {})


OF_TOKENS = ("log_probs", "entropy", "top_k")


def of_tokens(name: str) -> Collective:
    """A function of rows whose vocabulary is sharded over all ranks."""
    function, values = getattr(ringray.nn, name), torch.randn(1, ROWS, VOCABULARY)
    labels = torch.ones(1, ROWS, dtype=torch.int64)
    others = {"token_log_probs": (labels,), "token_top_k": (2,)}.get(name, ())
    world = dist.group.WORLD

    def run(x: Any, *arguments: Any, **options: Any) -> Any:
        return function(x, *(arguments or others), **{"vocab_group": world, **options})

    wrong: Calls = {
        "logits: got torch.int64": partial(run, values.long()),
        "logits: got int": partial(run, 3),
        "temperature: got 0": partial(run, values, temperature=0),
        "rows: got 0": partial(run, values, rows=0),
        r"x: got torch.float32 of shape \(1, 10\)": partial(
            run, values[:, 0], head=nn.Linear(10, 10)
        ),
        "vmap": partial(in_vmap, run, values),
        "a FakeTensor|FakeTensors": partial(faked, run, values),
        "cannot send tensors of meta": partial(run, values.to("meta")),
        "rank is broken": partial(while_broken, F, "linear", partial(
            run, values, head=nn.Linear(VOCABULARY, VOCABULARY)
        )),
        "temperature: got -1": partial(compiled, partial(run, temperature=-1), values),
    }  # fmt: skip
    if name == "token_log_probs":
        far = labels.clone()
        far[0, 2] = 3 * VOCABULARY
        wrong |= {
            "labels: got 30, expected 0 to 29": partial(run, values, far),
            r"labels: got torch.int64 of shape \(1, 3\)": partial(run, values, labels[:, 1:]),
            "ignore_index: got -100, .* torch.uint8": partial(run, values, labels.byte()),
            "labels: got 30, expected 0": partial(compiled, run, values, far),
        }
    if name == "token_top_k":
        wrong |= {
            "k: got 31, expected at most 30": partial(run, values, 31),
            "k: got 1.5": partial(run, values, 1.5),
        }
    other: Calls = {
        "temperature: ": partial(run, values, temperature=2),
        "dtype: ": partial(run, values.double()),
        "shape: ": partial(run, values[:, :2], *(x[:, :2] for x in others if x is labels)),
        "columns: ": partial(run, values[..., :4]),
        "disagree about what they do": partial(ringray.unshard, values, dim=1),
    }  # fmt: skip
    return Collective(partial(run, values), wrong, other)


def backward_of_unshard() -> Collective:
    def run(name: str | None = None) -> None:
        whole = ringray.unshard(torch.randn(2, ROWS, 3).requires_grad_(), dim=1)
        backward = whole.sum().backward
        while_broken(Tensor, name, backward) if name else backward()

    return Collective(run, {"rank is broken": partial(run, "contiguous")}, {})


def distributed(x: Tensor) -> Tensor:
    mesh = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


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
    """A call that differs in each value on which ranks agree."""
    run = ringray.ring_attention
    options: dict[str, dict[str, Any]] = {
        "seq_len": {"seq_len": 7}, "causal": {"causal": False}, "window": {"window": 3},
        "chunk": {"chunk": 3}, "prefix": {"prefix": 3},
        "global_tokens": {"window": 3, "global_tokens": 2},
        "shared_prefix": {"window": 3, "shared_prefix": 2},
        "cu_seqlens": {"cu_seqlens": [0, 3, 12]}, "scale": {"scale": 0.3},
        "softcap": {"softcap": 5.0}, "sinks": {"sinks": torch.zeros(2)},
        "alibi_slopes": {"alibi_slopes": [0.5] * 2},
        "distance_bias": {"distance_bias": torch.zeros(2, 3)},
        "attn_bias": {"attn_bias": torch.zeros(1, 2, 4, 12)}, "quantized": {"quantize": "fp8"},
        "dropout_seed": {"dropout_p": 0.5, "dropout_seed": 3},
        "partition": {"partition": "striped"}, "transport": {"transport": "bidirectional"},
        "backward": {"backward": "query-side"}, "backend": {"backend": "reference"},
        "blocks": {"blocks": 64},
    }  # fmt: skip
    tensors = {
        "batch": [x.repeat(2, 1, 1, 1)] * 3, "heads": [x.repeat(1, 2, 1, 1)] * 3,
        "head_dim": [x[..., :8]] * 3, "value_dim": [x, x, x[..., :8]], "dtype": [x.half()] * 3,
        "requires_grad": [x.clone().requires_grad_(), x, x],
    }  # fmt: skip
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
    }  # fmt: skip
    return Collective(run, wrong, {"partition: ": partial(run, partition="contiguous")})


def meshes() -> Collective:
    ranks = dist.get_world_size()
    run = ringray.make_mesh
    wrong: Calls = {"needs 5 ranks": partial(run, Degrees(5)), "dp: got 0": partial(run, dp=0)}
    return Collective(run, wrong, {"degrees: ": partial(run, Degrees(ranks))})


def sharded_models() -> Collective:
    whole = ringray.make_mesh()

    def run(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        return ringray.parallelize(ringray.ContextParallelAttention(8, 2), whole, **options)

    tensors = Degrees(1, 1, dist.get_world_size())
    mesh = type(whole)(tensors, whole.device, whole.whole, whole.shards)
    wrong = {"only a Decoder": lambda: ringray.parallelize(nn.Linear(2, 2), mesh)}
    return Collective(run, wrong, {"dtype: ": partial(run, dtype=torch.bfloat16)})


def offloading() -> Collective:
    def run(layers: int = 2) -> None:
        some = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers))
        ringray.offload(nn.Sequential(nn.Identity(), some))

    wrong = {"no list of layers": partial(ringray.offload, nn.Linear(2, 2))}
    return Collective(run, wrong, {"layers: ": partial(run, 3)})


def steps(folder: Path) -> Collective:
    made = trainer.Trainer(
        TINY, ringray.make_mesh(), Recipe(seq_len=16), RandomTokens(TINY.vocab)
    )  # fmt: skip
    checkpoints = checkpoint.Checkpoints(folder)

    def run(step: int = 1) -> None:
        made.step()
        checkpoints.save(step, made.model, made.optimizer, {})
        checkpoints.wait()
        assert checkpoints.load(made.model, made.optimizer) == {"step": step}

    def load() -> None:
        made.step()
        checkpoints.save(1, made.model, made.optimizer, {})
        checkpoints.wait()
        while_broken(checkpoint, "complete", partial(checkpoints.load, made.model, made.optimizer))

    wrong: Calls = {
        "rank is broken": partial(while_broken, made, "_read", made.step),
        "rank is": load,
    }
    return Collective(run, wrong, {"save: .*step: |a step": partial(run, 2)})


COLLECTIVES: dict[str, Callable[[], Collective]] = {
    "ContextParallelAttention": module, "ShardedKV": decoding, "context_parallel": routing,
    "make_mesh": meshes, "offload": offloading, "parallelize": sharded_models,
    "ring_attention": attention,
    "ring_decode": decoding, "sharded_cross_entropy": plain_loss,
    "sharded_linear_cross_entropy": linear_loss, "shift": shifting, "unshard": unsharding,
    **{f"token_{name}": partial(of_tokens, f"token_{name}") for name in OF_TOKENS},
    "backward of shift": backward_of_shift,
    "backward of unshard": backward_of_unshard,
}  # fmt: skip
