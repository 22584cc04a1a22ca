"""Checks of every rank: a training whose layers' inputs leave the device is the same training."""

from __future__ import annotations

import errno
import gc
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringray
import ringray.models.huggingface as hf
from ringray.attention.agreement import RefusedError
from ringray.lab.ring.actor import MemoryLimit
from ringray.models.decoder import Decoder
from ringray.nn import next_token_labels
from ringray.training import mesh as meshes
from ringray.training import offload
from ringray.training.corpus import RandomTokens
from ringray.training.recipe import Degrees, Recipe
from ringray.training.trainer import Trainer
from tests.support.huggingface_checks import tiny, tokens
from tests.support.training_checks import TINY

SEQ_LEN = 126
RECIPE = Recipe(SEQ_LEN, sequences=2, steps=2, warmup=1, mlp_rows=32, loss_rows=32)


def decoder(seed: int = 0, **options: Any) -> Decoder:
    made = Decoder(TINY, mlp_rows=16, **{"kept": "input", **options})
    made.reset(seed)
    return made


def loss(model: nn.Module, batch: int = 1, **options: Any) -> Tensor:
    ids = torch.arange(batch * SEQ_LEN).view(batch, -1) * 7 % TINY.vocab
    rows, labels = (ringray.shard(x, dim=1, pad_value=-100) for x in (ids, next_token_labels(ids)))
    return model(rows.clamp(min=0), labels=labels, seq_len=SEQ_LEN, **options)


def gradients(model: nn.Module) -> list[Tensor]:
    return [weight.grad for weight in model.parameters()]


def equal(xs: list[Tensor], ys: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def steps_are_bitwise_the_same(degrees: Degrees, kept: Any, rank: int, size: int) -> None:
    """Losses, norms and weights, micro-batches and stages included."""
    mesh, results = meshes.make_mesh(degrees), []
    for away in (False, True):
        recipe = replace(RECIPE, kept=kept, offload=away)
        made = Trainer(TINY, mesh, recipe, RandomTokens(TINY.vocab))
        steps = [made.step() for _ in range(2)]
        results.append(
            (steps, [weight.full_tensor().clone() for weight in made.model.parameters()])
        )
    assert results[0][0] == results[1][0]
    assert equal(results[0][1], results[1][1])


def hugging_face_model_is_the_same(rank: int, size: int) -> None:
    ids, labels = tokens()
    mesh, results = meshes.make_mesh(), []
    for away in (False, True):
        model = tiny("ringray").train()
        model.gradient_checkpointing_enable()
        ringray.parallelize(model, mesh, offload=away)
        batch = hf.shard_batch(
            model, ids, labels=labels, group=mesh.ring, gradients="mean"
        )  # fmt: skip
        of_ring = model(**batch).loss
        of_ring.backward()
        results.append([of_ring.detach(), *(grad.full_tensor() for grad in gradients(model))])
    assert equal(*results)

    alone = tiny("ringray").train()
    alone.gradient_checkpointing_enable()
    away = ringray.offload(alone)
    batch = hf.shard_batch(alone, ids, labels=labels)
    of_ring = alone(**batch).loss
    rows = batch["input_ids"].numel()
    assert away.bytes == alone.config.num_hidden_layers * rows * alone.config.hidden_size * 4
    of_ring.backward()
    assert away.bytes == 0

    whole = tiny("ringray").train()  # without checkpointing
    ringray.offload(whole)
    with pytest.raises(ValueError, match="a LlamaDecoderLayer keeps other tensors"):
        whole(**hf.shard_batch(whole, ids, labels=labels))


def disk_without_room(rank: int, size: int) -> None:
    """The step in which a rank has no room is as any other; the next forward says so everywhere."""
    wanted = decoder()
    loss(wanted).backward()
    model = decoder()
    away = ringray.offload(model)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, before[1]))  # bytes of a file
    try:
        loss(model).backward()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert equal(gradients(model), gradients(wanted))
    model.zero_grad()
    error = offload.OffloadError if rank == size - 1 else RefusedError
    says = os.strerror(errno.EFBIG) if rank == size - 1 else f"rank.s. {size - 1} were refused"
    with pytest.raises(error, match=says):
        loss(model)
    loss(model).backward()  # there is room again
    assert equal(gradients(model), gradients(wanted))
    assert away.bytes == 0


class Stream(nn.Module):
    """Layers that cost little beside the stream between them, checkpointed."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self._scaled, x, use_reentrant=False)

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


def fits_only_away(folder: Path, rank: int, size: int) -> None:
    """The kernel refuses the memory of 8 streams, and grants that of 6; each is too large for the
    allocator to keep when it is freed."""
    x = torch.ones(1, 1 << 14, 576)
    limit = MemoryLimit(6 * x.nbytes)
    limit.impose()
    try:
        with pytest.raises(RuntimeError, match=r"not enough memory|can't allocate memory"):
            Stream(8)(x).sum().backward()
        gc.collect()  # the error and what it holds
        model = Stream(8)
        away = ringray.offload(model, folder=folder)
        out = model(x).sum()
        assert away.bytes == 8 * x.nbytes
        out.backward()
    finally:
        limit.lift()
    want = x.numel() * 0.9**7
    assert all(layer.scale.grad.item() == pytest.approx(want, rel=1e-3) for layer in model.layers)
