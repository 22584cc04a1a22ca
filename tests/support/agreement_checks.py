"""Checks of every rank of a real ring: what it refuses, says and keeps apart from its peers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringray
from tests.support.ranks import SHORT, Case


def order_of_backward(rank: int, size: int) -> None:
    """Ranks that run other backward passes learn it before anything is sent."""
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
    told(lambda: call() if last else first.backward(dout), "ring_attention", "in the same order")
    first, second = call(), call()
    (first.sum() + second.sum()).backward()  # autograd's order is the same on every rank


def timeouts_say_where(rank: int, size: int) -> None:
    """A rank that skips a pass leaves the others with its name and a hint, not a bare timeout."""
    group = dist.new_group(timeout=SHORT)
    case = Case("zigzag", seq_len=12 * size)
    q, k, v, dout = case.shards()
    out = ringray.ring_attention(q.requires_grad_(), k, v, group=group, causal=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGRAY_AGREEMENT", "0")
        if rank != size - 1:
            with pytest.raises(RuntimeError, match=rf"rank {rank}, backward, .*in the same order"):
                out.backward(dout)  # type: ignore[union-attr]
    dist.barrier()


def messages_of_a_user(rank: int, size: int) -> None:
    """A user's own messages with the default tag are not mixed up with the ring's."""
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


def without_agreement(rank: int, size: int) -> None:
    """Production runs may turn the exchange off; nothing else changes."""
    case = Case("zigzag-token", window=11)
    want = case.run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RINGRAY_AGREEMENT", "0")
        got = case.run()
    assert all(torch.equal(got[name], want[name]) for name in want)
