"""Checks of every rank of a real ring: a training loop of Accelerate, whose context parallelism
is the ring."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, LlamaConfig

from ringray.plugins.accelerate import use_ring

VOCABULARY, SEQ_LEN = 97, 64


@contextmanager
def accelerator(size: int = 1, cp: int | None = None) -> Iterator[Any]:
    """Makes an accelerator of ``size`` processes with a ``cp`` mesh, and ends its global state."""
    from accelerate import Accelerator, PartialState
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    states = (AcceleratorState, PartialState, GradientState)
    with pytest.MonkeyPatch.context() as patch:
        options: dict[str, Any] = {}
        if size > 1:
            rank = str(dist.get_rank())
            for name, value in (
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", str(size)),
                ("MASTER_ADDR", "localhost"),
                ("MASTER_PORT", "0"),
            ):
                patch.setitem(os.environ, name, value)
            # Accelerate lets no CPU have FSDP and context parallelism, so these say that they are
            # GPUs. All that runs after that is its own, on gloo.
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            options = {
                "parallelism_config": ParallelismConfig(
                    cp_size=size if cp is None else cp, dp_shard_size=size // cp if cp else 1
                ),
                "fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2),
            }
        try:
            yield Accelerator(cpu=True, **options)
        finally:
            for state in states:
                state._reset_state()


def prepared(accelerated: Any, attention: str = "sdpa") -> tuple[Any, Any]:
    """Makes a tiny Llama and its optimizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    made: tuple[Any, Any] = accelerated.prepare(model, AdamW(model.parameters(), lr=3e-3))
    return made


def batch(step: int, seq_len: int = SEQ_LEN) -> dict[str, Tensor]:
    """Tokens that follow a rule; the first ones have no labels, so that ranks hold unlike many."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (2, 1), generator=generator)
    ids = (first + 3 * torch.arange(seq_len)) % VOCABULARY
    labels = ids.clone()
    labels[:, :37] = -100
    return {
        "input_ids": ids,
        "shift_labels": F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous(),
        "position_ids": torch.arange(seq_len).expand(2, -1).contiguous(),
    }


def losses(accelerated: Any, steps: int, seq_len: int = SEQ_LEN) -> list[float]:
    """Runs the loop of Accelerate's documentation."""
    model, optimizer = prepared(accelerated)
    means = []
    for step in range(steps):
        tensors = batch(step, seq_len)
        buffers = [*tensors.values()]
        with accelerated.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=[1] * 3, no_restore_buffers=set(buffers)
        ):
            loss = model(**tensors, labels=tensors["shift_labels"], use_cache=False).loss
            accelerated.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        means.append(float(accelerated.reduce(loss.detach(), "mean")))
    return means


def alone(steps: int, seq_len: int = SEQ_LEN) -> list[float]:
    """Losses of one process, without context parallelism."""
    with accelerator() as accelerated:
        return losses(accelerated, steps, seq_len)


def trains_alike(rank: int, size: int) -> None:
    """Losses over 50 steps, and of a length with padding, are those of one process."""
    want, padded = alone(50), alone(5, 61)
    assert want[-1] < 0.8 * want[0]
    with accelerator(size) as accelerated:
        use_ring(accelerated)
        worst = max(abs(a - b) / b for a, b in zip(losses(accelerated, 50), want, strict=True))
    if rank == 0:
        print(f"Accelerate: 50 steps, losses differ by {worst:.1e} at most")
    assert worst < 1e-4
    with accelerator(size) as accelerated:
        use_ring(accelerated, partition="contiguous", pad_values=(0, -100, 0))
        assert losses(accelerated, 5, 61) == pytest.approx(padded, abs=1e-4)


def is_a_ring_of_one(rank: int, size: int) -> None:
    """Routes the attention of one process, too."""
    want = alone(3)
    with accelerator() as accelerated:
        use_ring(accelerated)
        assert losses(accelerated, 3) == pytest.approx(want, abs=1e-6)
        never = pytest.raises(ValueError, match="never called scaled_dot_product_attention")
        with never, accelerated.maybe_context_parallel():
            pass
        rows = pytest.raises(ValueError, match="got 61 rows, which 'zigzag' fills up to 62")
        with rows, accelerated.maybe_context_parallel([torch.arange(61)], [0]):
            pass


def is_never_bypassed(rank: int, size: int) -> None:
    """Refuses on every rank what would train beside the ring, or on a wrong loss."""
    refused = partial(pytest.raises, ValueError)
    alone = refused(match="2 processes without context parallelism")
    with accelerator(size, cp=1) as accelerated, alone:
        use_ring(accelerated)
    with accelerator(size) as accelerated:
        model, _ = prepared(accelerated)  # before, this time
        eager, _ = prepared(accelerated, "eager")
        use_ring(accelerated)
        with refused(match="expected one call of use_ring"):
            use_ring(accelerated)
        tensors = batch(0)
        ids = tensors["input_ids"]
        with refused(match="outside of accelerator.maybe_context_parallel"):
            model(**tensors)
        with torch.no_grad():
            model(ids)  # nothing is trained
        block = partial(accelerated.maybe_context_parallel, [ids], [1])
        with refused(match="labels: got them without shift_labels"), block():
            model(ids, labels=ids)
        assert ids.shape[1] == SEQ_LEN  # restored
        odd = accelerated.maybe_context_parallel([ids[:, :61]], [1])
        with refused(match="got 61 rows, which 'zigzag' fills up to 64, expected so many"), odd:
            pass
        with refused(match="never called scaled_dot_product_attention"), block():
            eager(ids)
        # One rank is wrong: the other ranks are told.
        match = "without shift_labels" if rank else "rank.s. 1 were refused"
        with refused(match=match), block():
            model(ids, **({"labels": ids} if rank else {}))
