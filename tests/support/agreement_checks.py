"""Checks of every rank of a real ring: what it refuses, says and keeps apart from its peers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import ringray
from tests.support.ranks import HEADS, SHORT, Case

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def order_of_backward(rank: int, size: int) -> None:
    """Ranks that run other backward passes learn it before anything is sent."""
    if size == 1:
        return
    case, last = Case("zigzag", seq_len=12 * size), rank == size - 1
    q, k, v, dout = case.shards()

    def call() -> Tensor:
        return ringray.ring_attention(q.requires_grad_(), k, v)  # type: ignore[return-value]

    def whole(x: Tensor) -> Tensor:
        return ringray.unshard(x.requires_grad_(), dim=2)

    def told(work: Callable[[], object], *says: str) -> None:
        with pytest.raises(ValueError, match="a backward pass") as error:
            work()
        assert all(one in str(error.value) for one in says), error.value
        case.run()  # nothing is left in the group

    first, second = call(), call()
    told(lambda: (second if last else first).backward(dout), "call: ", " there (rank(s) ")
    first, second = whole(q.detach()), whole(k.detach())
    told(lambda: (second if last else first).sum().backward(), "call: ")
    first, joined = call(), whole(q.detach())
    told(lambda: joined.sum().backward() if last else first.backward(dout), "call: ")
    first = call()
    loss = lambda **how: ringray.sharded_cross_entropy(  # noqa: E731
        q.detach()[0, 0], torch.zeros(q.shape[2]).long(), **how
    )
    with pytest.raises(ValueError, match="sharded_cross_entropy: ranks disagree"):
        loss() if last else loss(gradients="mean")
    with pytest.raises(ValueError, match="sharded_cross_entropy"):
        loss() if last else whole(q.detach())
    told(lambda: call() if last else first.backward(dout), "ring_attention", "in the same order")
    first, second = call(), call()
    (first.sum() + second.sum()).backward()  # autograd's order is the same on every rank


def timeouts_say_where(rank: int, size: int) -> None:
    """A rank that skips a pass leaves the others with its name and a hint, not a bare timeout."""
    if size == 1:
        return
    for agreement, hop in (("1", "agreement about a backward pass"), ("0", "backward, ")):
        group = dist.new_group(timeout=SHORT)
        case = Case("zigzag", seq_len=12 * size)
        q, k, v, dout = case.shards()
        out = ringray.ring_attention(q.requires_grad_(), k, v, group=group, causal=False)
        os.environ["RINGRAY_AGREEMENT"] = agreement
        try:
            if rank != size - 1:
                with pytest.raises(RuntimeError, match=rf"rank {rank}, {hop}.*in the same order"):
                    out.backward(dout)  # type: ignore[union-attr]
        finally:
            del os.environ["RINGRAY_AGREEMENT"]
        dist.barrier()


def messages_of_a_user(rank: int, size: int) -> None:
    """A user's own messages with the default tag are not mixed up with the ring's."""
    if size == 1:
        return
    case = Case("contiguous", causal=False)
    want = case.run()
    own, got = torch.full((3,), float(rank)), torch.empty(3)
    receiving = dist.irecv(got, (rank - 1) % size)  # posted before the ring's
    assert receiving is not None
    found = case.run()
    sending = dist.isend(own, (rank + 1) % size)
    assert sending is not None
    sending.wait()
    receiving.wait()
    assert (got == (rank - 1) % size).all()
    assert all(torch.equal(found[name], want[name]) for name in want)


def unshard_compares(rank: int, size: int) -> None:
    """Shards that do not belong together are refused on every rank, and so are other tensors."""
    last = rank == size - 1
    x = torch.zeros(2, 6, 3)
    wrong: dict[str, Callable[[], Tensor]] = {
        "rows_per_rank": lambda: ringray.unshard(x[:, :4], dim=1),
        "shape": lambda: ringray.unshard(x[..., :2], dim=1),
        "dtype": lambda: ringray.unshard(x.double(), dim=1),
        "dim": lambda: ringray.unshard(x.transpose(0, 1).contiguous(), dim=0),
        "partition": lambda: ringray.unshard(x, dim=1, partition="striped"),
        "seq_len": lambda: ringray.unshard(x, dim=1, seq_len=6 * size - 1),
        "gradients: ": lambda: ringray.unshard(x, dim=1, gradients="mean"),
        "expected a plain, dense": lambda: ringray.unshard(x.to_sparse(), dim=1),
        "of layout": lambda: ringray.unshard(_distributed(x), dim=1),
        "expected 'sum'": lambda: ringray.unshard(x, dim=1, gradients="own"),
        "dim: got 3": lambda: ringray.unshard(x, dim=3),
    }
    for says, call in wrong.items():
        if size == 1 and not says.startswith(("expected", "of", "dim: ")):
            continue
        refused = says.startswith(("expected", "of", "dim: "))
        with pytest.raises(ValueError, match=says if last or not refused else "were refused"):
            call() if last else ringray.unshard(x, dim=1)
        ringray.unshard(x, dim=1)


def _distributed(x: Tensor) -> Tensor:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = DeviceMesh("cpu", [dist.get_rank()], _init_backend=False)
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def disagreement(rank: int, size: int) -> None:
    """Whatever is wrong on one rank, all ranks raise, and the ring works afterwards."""
    if size == 1:
        return
    case = Case("zigzag", seq_len=64 if size != 3 else 66)
    last = rank == size - 1
    q, k, v, _ = case.shards()
    more = case.arguments
    whole = torch.tensor([0, case.seq_len])
    zigzag_token = {**more, "partition": "zigzag-token"}
    wrong: dict[str, tuple[list[Tensor], dict[str, Any], str]] = {
        "partition": ([q, k, v], zigzag_token, "disagree about the problem: partition"),
        "batch": ([x.repeat(2, 1, 1, 1) for x in (q, k, v)], more, "batch: "),
        "head dim": ([x[..., :8] for x in (q, k, v)], more, "head_dim: "),
        "dtype": ([x.half() for x in (q, k, v)], more, "dtype: "),
        "value dim": ([q, k, v[..., :8]], more, "value_dim: "),
        "softcap": ([q, k, v], {**more, "softcap": 50}, "softcap: "),
        "wrong softcap": ([q, k, v], {**more, "softcap": 0}, "softcap: got 0, expected None or"),
        "sinks": ([q, k, v], {**more, "sinks": torch.zeros(HEADS)}, "sinks: "),
        "wrong sinks": ([q, k, v], {**more, "sinks": torch.zeros(1)}, "sinks: got"),
        "slopes": ([q, k, v], {**more, "alibi_slopes": [0.5] * HEADS}, "alibi_slopes: "),
        "wrong slopes": (
            [q, k, v], {**more, "alibi_slopes": [float("nan")] * HEADS}, "alibi_slopes: got nan",
        ),
        "table": ([q, k, v], {**more, "distance_bias": torch.zeros(HEADS, 3)}, "distance_bias: "),
        "wrong table": (
            [q, k, v], {**more, "distance_bias": torch.zeros(HEADS, 4)}, "distance_bias: got",
        ),
        "window": ([q, k, v], {**more, "window": 3}, "window: "),
        "chunk": ([q, k, v], {**more, "chunk": 3}, "chunk: "),
        "prefix": ([q, k, v], {**more, "prefix": 3}, "prefix: "),
        "globals": ([q, k, v], {**more, "window": 3, "global_tokens": 2}, "global_tokens: "),
        "shared": ([q, k, v], {**more, "window": 3, "shared_prefix": 2}, "shared_prefix: "),
        "wrong globals": ([q, k, v], {**more, "global_tokens": 2}, "got 2 without window and"),
        "blocks": ([q, k, v], {**more, "blocks": 64}, "blocks: "),
        "kind of blocks": ([q, k, v], {**more, "blocks": ringray.Blocks()}, "'aten' takes None or"),
        "documents": ([q, k, v], {**more, "cu_seqlens": whole}, "cu_seqlens: "),
        "gradient": ([q.clone().requires_grad_(), k, v], more, "requires_grad"),
        "mixed dtypes": ([q, k.half(), v], more, "k: got torch.float16"),
        "integers": ([q.int(), k.int(), v.int()], more, "q: got torch.int32"),
        "sparse": ([q.to_sparse(), k, v], more, "expected a plain, dense tensor"),
        "DTensor": ([_distributed(q), k, v], more, "expected a plain, dense tensor"),
        "meta": ([x.to("meta") for x in (q, k, v)], more, "no backend computes|tensors on meta"),
        "nested": ([torch.nested.nested_tensor([q[0]]), k, v], more, "expected a plain, dense"),
        "foreign name": ([q, k, v], {**more, "is_causal": True}, "ringray calls it causal"),
        "no tensor": ([3, k, v], more, "q: got int, expected a tensor"),  # type: ignore[list-item]
        "rows": ([x[:, :, :-1] for x in (q, k, v)], more, "seq_len: "),
        "name": ([q, k, v], {**more, "partition": "zigzags"}, "did you mean 'zigzag'"),
        "backend": ([q, k, v], {**more, "backend": "atn"}, "backend: got 'atn'"),
        "boundaries": ([q, k, v], {**more, "cu_seqlens": torch.tensor([0, 3])}, "cu_seqlens: "),
    }  # fmt: skip
    refused = (
        "meta",
        "foreign name",
        "sparse",
        "DTensor",
        "nested",
        "kind of",
        "wrong",
        "mixed",
        "integers",
        "no tensor",
        "rows",
        "name",
        "backend",
        "boundaries",
    )
    for name, (tensors, changed, says) in wrong.items():
        told = ""
        try:
            if last:
                ringray.ring_attention(*tensors, **changed)
            else:
                ringray.ring_attention(q, k, v, **more)
        except ValueError as error:
            told = str(error)
        if not last and name.startswith(refused):
            says = f"the arguments of rank(s) {size - 1} were refused"
        assert any(one in told for one in says.split("|")), (
            f"{name} on rank {rank}: {told or 'told nothing'}"
        )
        # Nothing is left in the group that a later call could mistake for its own.
        case.run()


def without_agreement(rank: int, size: int) -> None:
    """Production runs may turn the exchange off; nothing else changes."""
    case = Case("zigzag-token", window=11)
    want = case.run()
    os.environ["RINGRAY_AGREEMENT"] = "0"
    try:
        got = case.run()
    finally:
        del os.environ["RINGRAY_AGREEMENT"]
    assert all(torch.equal(got[name], want[name]) for name in want)
