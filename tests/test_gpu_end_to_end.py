"""The library from end to end on a GPU; what a CPU can do of it runs there too, in small.

Like the tests of the kernels it needs torch, triton, numpy and pytest only. A test that hangs ends
its process, whose other tests go on in a new one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringray
from ringray.comm.batch import Batch
from ringray.comm.ring import Comm
from ringray.models.sizes import Model
from ringray.training.corpus import NO_LABEL, SequenceRows
from ringray.training.mesh import make_mesh
from ringray.training.recipe import Recipe
from ringray.training.trainer import Trainer
from ringray_kernels import testing
from ringray_kernels.api import load_backend
from ringray_kernels.backends import BACKENDS, GPU_ONLY
from tests.support.ranks import on_ring

pytestmark = pytest.mark.timeout(120, method="thread")

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = pytest.param("cuda", marks=GPU)
SLOW_CPU = pytest.param("cpu", marks=pytest.mark.exhaustive)
TIMEOUT = timedelta(seconds=60)
LIMIT = 0.02  # of the relative error in bf16

Op = Callable[[Tensor, Tensor, Tensor], Tensor]
Tensors = tuple[Tensor, ...]


def on_gpu(test: Any) -> Any:
    for mark in GPU:
        test = mark(test)
    return test


def inputs(
    device: str, rows: int, head_dim: int, heads: int = 8, kv_heads: int = 2, seed: int = 0
) -> Tensors:
    return testing.make_inputs(
        1, heads, kv_heads, rows, head_dim, torch.bfloat16, seed=seed, device=device
    )


def results(op: Op, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Tensors:
    """out, dq, dk, dv."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = op(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def right(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **mask: Any) -> Tensors:
    """out, dq, dk, dv by definition, in fp64."""
    seen = testing.visible(q.shape[2], causal=True, device=q.device, **mask)
    return tuple(testing.oracle(q, k, v, dout, seen, scale=q.shape[3] ** -0.5))[:4]


def off(got: Tensors, want: Tensors) -> float:
    """The largest relative error."""
    return max(
        float((x.double() - y.double()).norm() / y.double().norm())
        for x, y in zip(got, want, strict=True)
    )


@pytest.fixture
def alone(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of the one rank of a process group."""
    device: str = request.param
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield device
    dist.destroy_process_group()


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(128, 8), (64, 2), (256, 1), (80, 2)])
@pytest.mark.parametrize("device", [CUDA])
def test_one_rank_attends(device: str, head_dim: int, kv_heads: int) -> None:
    tensors = inputs(device, 778, head_dim, kv_heads=kv_heads)
    assert off(results(ringray.ring_attention, *tensors), right(*tensors)) < LIMIT


@pytest.mark.parametrize("mask", [{}, {"window": 100}], ids=["causal", "window"])
@pytest.mark.parametrize("name", sorted({*BACKENDS} - {"triton"}))
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_every_backend_takes_shared_heads_and_masks(
    device: str, name: str, mask: dict[str, int]
) -> None:
    if device == "cpu" and name in GPU_ONLY:
        pytest.skip("needs a GPU")
    given = inputs(device, 400 if device == "cuda" else 150, 64)
    if reason := load_backend(name).unsupported(given[0]):
        pytest.skip(reason)

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ringray.ring_attention(q, k, v, backend=name, **mask)

    assert off(results(op, *given), right(*given, **mask)) < LIMIT


@on_gpu
def test_a_graph_replays_on_new_inputs() -> None:
    q, k, v, dout = inputs("cuda", 2048, 128)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def step() -> Tensors:
        return torch.autograd.grad(ringray.ring_attention(*leaves), leaves, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf, other in zip(leaves, inputs("cuda", 2048, 128, seed=5), strict=False):
            leaf.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)


@on_gpu
def test_a_compiled_step_is_the_same() -> None:
    """On a CPU test_compile.py has it."""
    given = inputs("cuda", 512, 128)
    weight = inputs("cuda", 128, 128, 1, 1)[0][0, 0] / 11

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ringray.ring_attention(q @ weight, k @ weight, v)

    compiled = torch.compile(step, fullgraph=True)
    assert off(results(compiled, *given), results(step, *given)) < LIMIT / 2


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_token_attends_to_a_long_cache(device: str) -> None:
    rows, head_dim = (32768, 128) if device == "cuda" else (512, 32)
    _, k, v, _ = inputs(device, rows + 1, head_dim, heads=2)
    q = inputs(device, 1, head_dim, seed=3)[0]
    cache = ringray.ShardedKV.of_shards(k[:, :, :rows], v[:, :, :rows], capacity=rows + 1)
    cache.append(k[:, :, rows:], v[:, :, rows:])
    with torch.no_grad():
        got = ringray.ring_decode(q, cache)
    wide = (x.double().repeat_interleave(4, 1) for x in (k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), *wide)
    assert off((got,), (want,)) < LIMIT / 2


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_attention_of_torch_is_replaced(device: str) -> None:
    q, k, v, dout = inputs(device, 300, 64, kv_heads=8)
    with ringray.context_parallel():
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert off((out,), right(q, k, v, dout)[:1]) < LIMIT / 2


def shards_attend(device: str, rank: int, size: int) -> None:
    tensors = inputs(device, 1000 if device == "cuda" else 100, 64)

    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ringray.ring_attention(q, k, v, transport="staged")

    shards = [ringray.shard(x, dim=2).contiguous() for x in tensors]
    want = tuple(ringray.shard(x, dim=2) for x in right(*tensors))
    assert off(results(op, *shards), want) < LIMIT


@pytest.mark.parametrize("device", [SLOW_CPU, CUDA])
def test_two_ranks_share_a_device(device: str) -> None:
    """NCCL refuses this; messages go through host memory."""
    on_ring(2, [partial(shards_attend, device)])


@on_gpu
def test_messages_over_nccl_with_integers_beside_them() -> None:
    """A rank to itself, in a group like those of the platform."""
    torch.cuda.set_device(0)
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    dist.init_process_group(
        "nccl", store=dist.PrefixStore("generation-1", dist.HashStore()), rank=0, world_size=1,
        timeout=TIMEOUT, device_id=torch.device("cuda", 0), pg_options=options,
    )  # fmt: skip
    try:
        comm = Comm(dist.group.WORLD)
        assert comm.gather_integers([7, -1], "test") == [[7, -1]]
        assert comm.largest([3], "test") == [3]
        sent = torch.randn(1 << 20, device="cuda")
        received = torch.empty_like(sent)
        for _ in range(3):
            batch = Batch("hop", "rows")
            batch.send(sent, 0)
            batch.receive(received, 0)
            comm.post(batch).wait()
        assert torch.equal(sent, received)
    finally:
        dist.destroy_process_group()


class Cycle:
    """A corpus that can be learned: each token follows from the one before."""

    vocabulary = 64

    def rows(self, number: int, seq_len: int, positions: Any) -> SequenceRows:
        tokens = (np.arange(seq_len + 1) * 7 + number) % self.vocabulary
        at = np.minimum(positions, seq_len - 1)
        labels = np.where(positions < seq_len, tokens[at + 1], NO_LABEL)
        return SequenceRows(tokens[at], labels, np.array([0, seq_len]))


@pytest.mark.parametrize("alone", [SLOW_CPU, CUDA], indirect=True)
def test_a_decoder_learns(alone: str) -> None:
    if alone == "cuda":
        model, seq_len, steps = Model("tiny", 4, 512, 8, 2, 64, 1024, 256), 4096, 50
    else:
        model, seq_len, steps = Model("tiny", 2, 64, 4, 2, 16, 96, 256), 64, 12
    dtype = "bfloat16" if alone == "cuda" else "float32"
    recipe = Recipe(seq_len=seq_len, steps=50, dtype=dtype, kept="attention")
    trainer = Trainer(model, make_mesh(device=alone), recipe, Cycle())  # type: ignore[arg-type]
    losses = [trainer.step().loss for _ in range(steps)]
    assert losses[-1] < 0.8 * losses[0] < math.inf, losses


@pytest.mark.parametrize("device", [SLOW_CPU, CUDA])
def test_a_model_of_huggingface_attends(device: str) -> None:
    """The loss and the gradients are those of SDPA."""
    transformers = pytest.importorskip("transformers")
    from ringray.models import huggingface

    huggingface.register()
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=600,
    )  # fmt: skip
    ids = torch.randint(97, (2, 509), generator=torch.Generator().manual_seed(1)).to(device)
    losses, gradients = [], []
    for attention in ("ringray", "sdpa"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        ).to(device, torch.bfloat16)
        batch = {"input_ids": ids, "labels": ids}
        if attention == "ringray":
            batch = huggingface.shard_batch(model, ids, labels=ids)
        loss = model(**batch).loss
        loss.backward()
        losses.append(float(loss))
        gradients.append(torch.cat([x.grad.float().flatten() for x in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert off((gradients[0],), (gradients[1],)) < 0.05
