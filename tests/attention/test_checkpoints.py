"""Checkpoints on a ring: what one rank repeats, keeps or fails to save is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ringray
from ringray.nn import keep_attention
from tests.support.ranks import on_ring


class Passes(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def inputs() -> Tensor:
    """q, k and v; the generator is at the same place after them."""
    torch.manual_seed(3)
    return torch.randn(3, 1, 2, 8, 8, requires_grad=True)


def gradients(attend: Any, x: Tensor, **options: Any) -> Tensor:
    out = checkpoint(attend, *x, use_reentrant=False, **options) if options else attend(*x)
    return torch.autograd.grad(out.square().sum(), x)[0]


def one_rank_repeats_more(rank: int, size: int) -> None:
    """A rank stops its repetition as soon as it has what it needs, which others are not told."""
    weight = torch.ones(8, requires_grad=True)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ringray.ring_attention(q, k, v)
        return out * weight if rank == size - 1 else out

    x = inputs()
    for options in ({"preserve_rng_state": True}, {"context_fn": keep_attention}):
        torch.testing.assert_close(gradients(block, x, **options), gradients(block, x))


def what_cannot_be_saved_is_its_own_error(rank: int, size: int) -> None:
    def pack(tensor: Tensor) -> Tensor:
        if rank == size - 1:
            raise KeyError("mine")
        return tensor

    for call in (
        lambda: ringray.ring_attention(*inputs()),
        lambda: ringray.unshard(inputs()[0], dim=2),
    ):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            if rank == size - 1:
                with pytest.raises(KeyError, match="mine"):
                    call()
            else:
                call()
        dist.barrier()  # none of them waits for it


def modes_in_one_of_both_passes(rank: int, size: int) -> None:
    """Saves the same if a mode sees the operator and if none does."""

    def nested(*x: Tensor) -> Tensor:
        return checkpoint(ringray.ring_attention, *x, use_reentrant=False)  # type: ignore[no-any-return]

    for options in ({}, {"cu_seqlens": [0, 5, 8 * size]}, {"dropout_p": 0.5}):

        def attend(*x: Tensor, options: dict[str, Any] = options) -> Tensor:
            return ringray.ring_attention(*x, **options)  # type: ignore[return-value]

        want = gradients(attend, inputs())
        for forward, backward in ((True, False), (False, True)):
            x = inputs()
            with Passes() if forward else torch.enable_grad():
                out = checkpoint(attend, *x, use_reentrant=False)
            with Passes() if backward else torch.enable_grad():
                (grad,) = torch.autograd.grad(out.square().sum(), x)
            assert torch.equal(grad, want), options
    x = inputs()
    torch.testing.assert_close(
        gradients(nested, x, context_fn=keep_attention), gradients(ringray.ring_attention, x)
    )


def kept_results_keep_what_was_dropped(rank: int, size: int) -> None:
    def attend(*x: Tensor) -> Tensor:
        return ringray.ring_attention(*x, dropout_p=0.5)  # type: ignore[return-value]

    want = gradients(attend, inputs())
    contexts = {"context_fn": keep_attention, "preserve_rng_state": False}
    assert torch.equal(gradients(attend, inputs(), **contexts), want)


def test_a_ring() -> None:
    checks = (
        one_rank_repeats_more, modes_in_one_of_both_passes,
        kept_results_keep_what_was_dropped, what_cannot_be_saved_is_its_own_error,
    )  # fmt: skip
    on_ring(2, checks)
