"""Checks of every rank of a real ring: ``context_parallel``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointError, checkpoint

import ringray
from ringray.partition import BALANCED, PARTITIONS
from ringray_kernels import testing
from tests.support.decoder import HIDDEN, SEQ_LEN, same_gradients, sum_gradients

HEADS, KV_HEADS = 4, 2


class PlainModel(nn.Module):
    """A user's model: it knows SDPA and position ids, and nothing about rings."""

    def __init__(self, *, causal: bool = True, scale: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(31, HIDDEN), nn.Embedding(SEQ_LEN, HIDDEN)
        self.q = nn.Linear(HIDDEN, HIDDEN)
        self.kv = nn.Linear(HIDDEN, 2 * HIDDEN * KV_HEADS // HEADS)
        self.head = nn.Linear(HIDDEN, 31)
        self.causal, self.scale = causal, scale
        self.mask: Tensor | None = None

    def attend(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        kv = self.kv(x).unflatten(-1, (2 * KV_HEADS, -1)).transpose(1, 2)
        k, v = kv.chunk(2, 1)
        causal = self.causal and self.mask is None
        out = F.scaled_dot_product_attention(
            q, k, v, self.mask, is_causal=causal, scale=self.scale, enable_gqa=True
        )
        return x + out.transpose(1, 2).flatten(2)

    def forward(
        self, ids: Tensor, positions: Tensor, again: Callable[..., Any] | None = None
    ) -> Tensor:
        x = self.words(ids) + self.places(positions)
        for _ in range(2):
            x = again(self.attend, x) if again else self.attend(x)
        return self.head(x)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Whole ids, labels (few of them in the second half) and positions."""
    rng = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, 31, (2, SEQ_LEN), generator=rng) for _ in range(2))
    labels[:, SEQ_LEN // 2 : -3] = -100
    return ids, labels, torch.arange(SEQ_LEN)[None].expand(2, -1)


non_reentrant = functools.partial(checkpoint, use_reentrant=False)


def ring_step(
    model: PlainModel, again: Callable[..., Any] | None = None, *, inside: bool = True, **how: Any
) -> Tensor:
    """Loss of one step under the manager, gradients summed; backward inside or after the block."""
    model.zero_grad()
    with ringray.context_parallel(
        buffers=batch(), buffer_dims=(1, 1, -1), pad_values=(0, -100, 0), **how
    ) as (ids, labels, positions):
        loss = ringray.sharded_cross_entropy(model(ids, positions, again), labels)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    sum_gradients(model)
    return loss.detach()


def plain_step(model: PlainModel, documents: Tensor | None, window: int | None) -> Tensor:
    """The same by one process and SDPA with its mask, no manager."""
    model.zero_grad()
    ids, labels, positions = batch()
    model.mask = testing.visible(SEQ_LEN, causal=model.causal, window=window, cu_seqlens=documents)
    loss = F.cross_entropy(model(ids, positions).flatten(0, 1), labels.flatten())
    loss.backward()
    model.mask = None
    return loss.detach()


def manager_is_exact(rank: int, size: int) -> None:
    """A model that knows nothing of rings gives one process's loss and gradients."""
    documents = torch.tensor([0, 5, 30, SEQ_LEN])
    models: tuple[dict[str, Any], ...] = ({}, {"causal": False}, {"scale": 0.5})
    cases = itertools.product(models, ({}, {"cu_seqlens": documents}, {"window": 7}))
    for partition, (how, where) in zip(itertools.cycle(PARTITIONS), cases, strict=False):
        if "window" in where and not how.get("causal", True):
            continue
        model, plain = PlainModel(**how), PlainModel(**how)
        want = plain_step(plain, where.get("cu_seqlens"), where.get("window"))
        got = ring_step(model, partition=partition, **where)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        same_gradients(model, plain)


def manager_is_dealt(rank: int, size: int) -> None:
    """The manager deals for a causal mask; any other is in what its caller gives."""
    documents = torch.tensor([0, 5, 30, SEQ_LEN])
    cases: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({}, {"cu_seqlens": documents}), ({}, {"window": 7}),
        ({"causal": False}, {"cu_seqlens": documents}),
    )  # fmt: skip
    for how, where in cases:
        ranges = ringray.deal(SEQ_LEN, size, **how, **where)
        listed = ringray.deal(SEQ_LEN, size, partition=ranges.indices(), **how, **where)
        plain = PlainModel(**how)
        want = plain_step(plain, where.get("cu_seqlens"), where.get("window"))
        for partition in (ranges, listed, *([] if how else [BALANCED])):
            model = PlainModel(**how)
            got = ring_step(model, partition=partition, **where)
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
            same_gradients(model, plain)
    with pytest.raises(ValueError, match="dealt for causal True, but the call has False"):
        ring_step(PlainModel(causal=False), partition=BALANCED)
    with (
        pytest.raises(ValueError, match="got 'balanced' without buffers and seq_len"),
        ringray.context_parallel(partition=BALANCED),
    ):
        pass


def _grads(model: nn.Module) -> list[Tensor]:
    return [x.grad.clone() for x in model.parameters() if x.grad is not None]


def backward_anywhere(rank: int, size: int) -> None:
    """Inside or after the block, checkpointed or not: the same bits, or an error."""
    model = PlainModel()
    loss = ring_step(model)
    want = _grads(model)
    for again, inside in ((None, False), (non_reentrant, True)):
        assert torch.equal(ring_step(model, again, inside=inside), loss)
        assert all(map(torch.equal, _grads(model), want)), (again, inside)
    with ringray.context_parallel(buffers=batch(), buffer_dims=(1, 1, 1)) as (ids, _, positions):
        out = model(ids, positions, non_reentrant)
        weights = [*model.parameters()]
        first = torch.autograd.grad(out, weights, torch.ones_like(out), retain_graph=True)
        model.zero_grad()
        torch.autograd.backward([out], [torch.ones_like(out)], retain_graph=True)
        assert all(map(torch.equal, _grads(model), first))
        out.backward(torch.ones_like(out), inputs=weights[:1])  # once more, for one of them
        torch.testing.assert_close(weights[0].grad, 2 * first[0])
        assert torch.equal(_grads(model)[1], first[1])
    # Recomputed without the manager, a layer would attend locally: PyTorch's check sees it.
    with pytest.raises(CheckpointError, match="during recomputation"):
        ring_step(model, non_reentrant, inside=False)
    with pytest.raises(ValueError, match="use_reentrant=True, expected use_reentrant=False"):
        ring_step(model, functools.partial(checkpoint, use_reentrant=True))
    assert torch.equal(ring_step(model), loss)


def fsdp(rank: int, size: int) -> None:
    """Parameters sharded by FSDP2 and layers checkpointed, under the manager."""
    plain = PlainModel()
    plain_step(plain, None, None)
    model = PlainModel()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    with ringray.context_parallel(
        buffers=batch(), buffer_dims=(1, 1, 1), pad_values=(0, -100, 0)
    ) as (ids, labels, positions):
        logits = model(ids, positions, non_reentrant)
        ringray.sharded_cross_entropy(logits, labels, gradients="mean").backward()
    same_gradients(model, plain)


def buffers_are_dealt(rank: int, size: int) -> None:
    """The block gets this rank's rows; the full tensors are left alone."""
    ids, labels, positions = batch()
    before = [x.clone() for x in (ids, labels, positions)]
    q = torch.randn(1, 1, 1, 8).expand(1, 1, -(-SEQ_LEN // (2 * size)) * 2, 8)
    with ringray.context_parallel(
        buffers=(ids, labels, positions.double()), buffer_dims=(1, -1, 1), pad_values=(7, -100, -1)
    ) as mine:
        F.scaled_dot_product_attention(q, q, q)
    at = ringray.local_positions("zigzag", SEQ_LEN, size, rank)
    tokens = at < SEQ_LEN
    for x, full, pad in zip(mine, (ids, labels, positions), (7, -100, -1), strict=True):
        assert torch.equal(x[:, tokens].long(), full[:, at[tokens]])
        assert (x[:, ~tokens] == pad).all()
    assert all(map(torch.equal, before, (ids, labels, positions)))


def other_groups(rank: int, size: int) -> None:
    """A ring of this rank alone is attention as it was."""
    groups = [dist.new_group([one]) for one in range(size)]
    q = torch.randn(1, 4, 16, 8)
    want = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with ringray.context_parallel(group=groups[rank]):
        got = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
