"""A call of the op after the first of its kind waits for no device, and keeps a bounded memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringray
from ringray import transport
from ringray.attention import arguments, problem
from ringray.attention.agreement import BACKWARD, AgreedCall, agree
from ringray.comm import ring as comm_ring
from ringray.comm.batch import Batch, Packed
from ringray.comm.ring import connect
from ringray_kernels import testing
from tests.support import host_reads
from tests.support.backend_problems import ON_GPU
from tests.support.exhaustive import exhaustive
from tests.support.ranks import Case, on_ring

MASKS: tuple[dict[str, Any], ...] = (
    {}, {"causal": False}, {"window": 9}, {"cu_seqlens": torch.tensor([0, 5, 5, 40, 64])},
)  # fmt: skip


def gpu(test: Any) -> Any:
    for mark in ON_GPU:
        test = mark(test)
    return test


def step(
    device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any
) -> tuple[Tensor, ...]:
    """Forward and backward of one new layer: out and gradients."""
    *qkv, dout = testing.make_inputs(1, 4, 2, 64, 16, dtype, seed=seed, device=device)
    leaves = [x.requires_grad_() for x in qkv]
    out, lse = ringray.ring_attention(*leaves, return_lse=True, **options)
    torch.autograd.backward((out, lse), (dout, torch.ones_like(lse)))
    return (out.detach(), *(x.grad for x in leaves))  # type: ignore[misc]


@pytest.mark.parametrize(
    "case",
    [
        *(("aten", mask) for mask in MASKS), ("triton", MASKS[0]),
        *exhaustive(*(("triton", mask) for mask in MASKS[1:])),
    ],
)  # fmt: skip
def test_nothing_is_read_after_the_first_call(case: tuple[str, dict[str, Any]]) -> None:
    backend, mask = case
    arguments._prepared.clear()
    if backend == "aten":  # that it would be noticed
        with pytest.raises(host_reads.HostReadError), host_reads.refused():
            step(backend=backend, **mask)
    want = step(backend=backend, **mask)
    with host_reads.refused():
        got = step(backend=backend, **mask)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_ring_reads_nothing() -> None:
    on_ring(2, (small_tensors_travel_together,))
    on_ring(3, (every_transport, host_group_beside, some_ranks_have_no_first_message))


def every_transport(rank: int, size: int) -> None:
    """Messages, sums and merges included; ``staged`` copies by definition."""
    heads = 2 * size
    for name in transport.TRANSPORTS:
        if name == "staged":
            continue
        for backward in ("auto", "reverse", "query-side") if name == "ring" else ("auto",):
            causal = backward != "reverse"
            case = Case(
                "zigzag", seq_len=32 * size, transport=name, backward=backward, heads=heads,
                kv_heads=heads, causal=causal,
            )  # fmt: skip
            shards = case.shards()
            for _ in range(2):
                want = _run(case, shards)
            with host_reads.refused():
                got = _run(case, shards)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name


def _run(case: Case, shards: list[Tensor]) -> tuple[Tensor, ...]:
    *qkv, dout = shards
    leaves = [x.detach().requires_grad_() for x in qkv]
    out: Tensor = ringray.ring_attention(*leaves, **case.arguments)  # type: ignore[assignment]
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def host_group_beside(rank: int, size: int) -> None:
    """Ranks of a group without host memory agree beside it, with its timeout."""
    ring = connect(dist.new_group(backend="cuda:gloo"))
    for call in range(3):
        values = [rank, -rank, 7 + call]
        assert ring.largest(values, "agreement") == [size - 1, 0, 7 + call]
    assert ring.gather_integers([rank, 5], "x") == [[other, 5] for other in range(size)]
    first = agree(ring, AgreedCall(BACKWARD, call=1))
    assert agree(ring, AgreedCall(BACKWARD, call=1)) == first + 1
    with pytest.raises(ValueError, match="call: "):
        agree(ring, AgreedCall(BACKWARD, call=2 if rank == size - 1 else 1))
    short = connect(dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=2)))
    dist.barrier()
    if rank:
        with pytest.raises(RuntimeError, match=rf"rank {rank}, agreement about .*the same order"):
            agree(short, AgreedCall(BACKWARD, call=1))
    dist.barrier()


def small_tensors_travel_together(rank: int, size: int) -> None:
    """As one message for each peer, of any dtypes and odd sizes; large ones go by themselves."""
    ring, other = connect(None), 1 - rank
    for rows, messages in ((3, 2), (1 << 14, 4)):
        ours = [torch.full((rows, 1), 1.0 + rank).bfloat16(), torch.full((2, rows, 5), 3.0 + rank)]
        came = [torch.zeros_like(x) for x in ours]
        batch = Batch("hop", "two tensors")
        for a, b in zip(ours, came, strict=True):
            batch.send(a, other)
            batch.receive(b, other)
        works = ring._start(batch)
        assert sum(not isinstance(work, Packed) for work in works) == messages
        for work in works:
            work.wait()
        assert all((x == 1 + 2 * i + other).all() for i, x in enumerate(came))


class Lazy(dist.ProcessGroup):
    """A group of which some ranks may exchange messages after an operation of all, as NCCL's."""

    _device_types = [torch.device("cpu")]  # type: ignore[assignment]  # noqa: RUF012

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        self.made = False

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(
            supports_coalescing=True, recv=self.backend.recv, send=self.backend.send
        )

    def all_reduce(self, tensor: Tensor, group: Any) -> None:
        dist.all_reduce(tensor)
        self.made = True

    def exchange(self, operations: list[tuple[Any, Tensor, int]]) -> list[Any]:
        assert self.made
        return [way([tensor], peer, 7) for way, tensor, peer in operations]

    def operation(self, way: Any, tensor: Tensor, *, group_peer: int, **_: Any) -> Any:
        return self.backend.send if way is dist.isend else self.backend.recv, tensor, group_peer


def some_ranks_have_no_first_message(rank: int, size: int) -> None:
    """A document ends at a shard's border, and where a tree has an odd number of leaves."""
    q, k, v, _ = (x.chunk(size, 2)[rank] for x in testing.make_inputs(
        1, 2, 2, 8 * size, 16, torch.float32, seed=0
    ))  # fmt: skip
    for decodes in (False, True):
        group = Lazy(rank, size)
        lazy: Any = SimpleNamespace(**vars(dist))
        lazy.all_reduce, lazy.P2POp = group.all_reduce, group.operation
        lazy.batch_isend_irecv = group.exchange
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(comm_ring, "dist", lazy)
            if decodes:
                cache = ringray.ShardedKV.of_shards(
                    k, v, capacity=8 * size, seq_len=8 * size, group=group
                )
                ringray.ring_decode(q[:, :, :1].clone().zero_(), cache, group=group)
            else:
                borders = torch.tensor([0, 16, 8 * size])
                ringray.ring_attention(
                    q, k, v, group=group, partition="contiguous", cu_seqlens=borders
                )
        assert group.made


def test_receives_begin_before_sends() -> None:
    batch, tensor = Batch(), torch.zeros(1)
    for begin, peer in ((batch.send, 1), (batch.receive, 2), (batch.send, 3), (batch.receive, 1)):
        begin(tensor, peer)
    assert list(batch.by_peer()) == [(False, 2), (False, 1), (True, 1), (True, 3)]


def test_the_oldest_problems_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond a number, and long ones by their positions."""
    arguments._prepared.clear()
    monkeypatch.setattr(arguments, "MOST_PROBLEMS", 5)
    kept_by_problem: list[weakref.ref[Any]] = []
    for rows in range(2, 22, 2):
        x = torch.zeros(1, 1, rows, 16)
        ringray.ring_attention(x, x, x)
        kept_by_problem.append(weakref.ref(next(reversed(arguments._prepared.values()))[0]))
    gc.collect()
    assert [ref() is not None for ref in kept_by_problem] == [False] * 4 + [True] * 6
    monkeypatch.setattr(arguments, "MOST_POSITIONS", 100)
    for rows in range(22, 40, 2):
        x = torch.zeros(1, 1, rows, 16)
        ringray.ring_attention(x, x, x)
    lengths = [problem.layout.padded for problem, _ in arguments._prepared.values()]
    assert lengths == [34, 36, 38]


def test_what_tells_problems_apart() -> None:
    """A call like an earlier one takes its problem, and no other does; True is no 1."""
    arguments._prepared.clear()
    q, k, v, _ = testing.make_inputs(1, 4, 2, 8, 16, torch.float32, seed=0)
    plain = ringray.ring_attention(q, k, v)
    assert torch.equal(ringray.ring_attention(q.clone(), k, v, window=None), plain)
    assert len(arguments._prepared) == 1
    for changed in ({"window": 1}, {"scale": 1}, {"cu_seqlens": [0, 1, 8]}, {"causal": False}):
        assert not torch.equal(ringray.ring_attention(q, k, v, **changed), plain)  # type: ignore[arg-type]
    for wrong in ({"window": True}, {"scale": True}, {"causal": 1}, {"causal": 0}):
        with pytest.raises(ValueError, match="got "):
            ringray.ring_attention(q, k, v, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="v: got shape"):
        ringray.ring_attention(q, k, v[:, :1])
    with pytest.raises(ValueError, match=r"k: got torch\.float64"):
        ringray.ring_attention(q, k.double(), v)


def test_boundaries_are_read_again_after_a_change() -> None:
    q, k, v, _ = testing.make_inputs(1, 4, 2, 8, 16, torch.float32, seed=0)
    cu = torch.tensor([0, 3, 8])
    first = ringray.ring_attention(q, k, v, cu_seqlens=cu)
    cu[1] = 5
    second = ringray.ring_attention(q, k, v, cu_seqlens=cu)
    assert torch.equal(second, ringray.ring_attention(q, k, v, cu_seqlens=[0, 5, 8]))  # type: ignore[arg-type]
    assert not torch.equal(second, first)  # type: ignore[arg-type]


def test_a_new_problem_is_refused_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments._prepared.clear()
    monkeypatch.setattr(problem, "capturing", lambda device: True)
    x = torch.zeros(1, 1, 8, 16)
    with pytest.raises(RuntimeError, match="run the step once, then capture it"):
        ringray.ring_attention(x, x, x)
    monkeypatch.undo()
    want = ringray.ring_attention(x, x, x)
    monkeypatch.setattr(problem, "capturing", lambda device: True)
    assert torch.equal(ringray.ring_attention(x, x, x), want)  # type: ignore[arg-type]


# On a GPU


@gpu
@pytest.mark.parametrize("backend", ["triton", "aten"])
@pytest.mark.parametrize("mask", MASKS, ids=["causal", "full", "window", "documents"])
def test_a_gpu_is_not_waited_for(backend: str, mask: dict[str, Any]) -> None:
    mask = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in mask.items()}
    options: dict[str, Any] = {"dtype": torch.bfloat16, "backend": backend, **mask}
    want = step("cuda", **options)
    *qkv, dout = testing.make_inputs(1, 4, 2, 64, 16, torch.bfloat16, seed=0, device="cuda")
    leaves = [x.requires_grad_() for x in qkv]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = ringray.ring_attention(*leaves, return_lse=True, backend=backend, **mask)
        torch.autograd.backward((out, lse), (dout, torch.ones_like(lse)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    got = (out.detach(), *(x.grad for x in leaves))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))  # type: ignore[arg-type]


def _trained(attend: Callable[..., Any]) -> tuple[Callable[[], Tensor], Tensor, list[Tensor]]:
    """A step of training: loss of an input that may be changed, and its gradients."""
    torch.manual_seed(0)
    module = ringray.ContextParallelAttention(64, 4, num_kv_heads=2, device="cuda")
    x = torch.randn(2, 64, 64, device="cuda")
    weights = list(module.parameters())

    def work() -> Tensor:
        for weight in weights:
            weight.grad = None
        loss = attend(module)(x).square().mean()
        loss.backward()
        return loss.detach()

    return work, x, weights


@gpu
def test_a_graph_captures_a_step_of_training() -> None:
    work, x, weights = _trained(lambda module: module)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = work()
    captured = [weight.grad for weight in weights]
    for seed in range(2):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        graph.replay()
        found = [loss.clone(), *(grad.clone() for grad in captured if grad is not None)]
        want = [work(), *(weight.grad for weight in weights)]
        assert len(found) == len(want)
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b)


@gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_of_training(mode: str) -> None:
    torch._dynamo.reset()
    eager, _, weights = _trained(lambda module: module)
    want = [eager(), *(weight.grad for weight in weights)]
    compiled, _, weights = _trained(lambda module: torch.compile(module, mode=mode))
    for _ in range(3):
        found = [compiled().clone(), *(weight.grad for weight in weights)]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
