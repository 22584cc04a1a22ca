"""Checks of every rank of a real ring: the module, the loss and the usual wrappers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringray
from ringray.comm.batch import METER
from ringray.nn import keep_attention
from ringray.partition import BALANCED, NAMES
from tests.support.decoder import (
    DOCUMENTS,
    HIDDEN,
    SEQ_LEN,
    Decoder,
    Text,
    Trainer,
    alone,
    gradients,
    same,
    same_gradients,
    sum_gradients,
    trainer_alone,
    twin_alone,
)
from tests.support.ranks import NAN, dealt

MODULES: tuple[dict[str, Any], ...] = (
    {},
    {"causal": False, "bias": True},
    {"window": 7, "num_kv_heads": 1, "dropout_p": 0.3},
    {"rope_theta": None, "num_kv_heads": 2},
    {"head_dim": 16, "num_kv_heads": 2, "rope_theta": 500000.0, "backend": "reference"},
)


def module_is_exact(rank: int, size: int) -> None:
    """Output and gradients are the module's own in one process, whatever padding holds."""
    cases = [
        (options, documents, SEQ_LEN) for options in MODULES for documents in (None, DOCUMENTS)
    ]
    cases.append(({}, None, 64))
    for partition, (arguments, documents, seq_len) in zip(
        itertools.cycle(NAMES), cases, strict=False
    ):
        torch.manual_seed(0)
        module = ringray.ContextParallelAttention(HIDDEN, 4, partition=partition, **arguments)
        what = (partition, arguments, documents, seq_len)
        want = _run(twin_alone(module), alone(), seq_len, documents)
        got = _run(module, None, seq_len, documents)
        for name, x in want.items():
            if name != "k_proj.bias":  # a softmax does not see it: its gradient is rounding
                same(got[name], x, (*what, name))


def _run(
    module: ringray.ContextParallelAttention | nn.Module,
    group: dist.ProcessGroup | None,
    seq_len: int,
    documents: tuple[int, ...] | None,
) -> dict[str, Tensor]:
    """Whole output, input gradient and summed parameter gradients; NaN in all padding."""
    assert isinstance(module, ringray.ContextParallelAttention)
    rng = torch.Generator().manual_seed(2)
    x, dout = (torch.randn(2, seq_len, HIDDEN, generator=rng) for _ in range(2))
    where: dict[str, Any] = {"cu_seqlens": None if documents is None else torch.tensor(documents)}
    mask = {"causal": module.causal, **where}
    partition = dealt(module.partition, seq_len, group, **mask)
    more: dict[str, Any] = {"dim": 1, "partition": partition, "group": group}
    mine = ringray.shard(x, pad_value=NAN, **more).requires_grad_()
    torch.manual_seed(3)  # dropout is the same on any ring
    out = module(mine, seq_len=seq_len, **where)
    if module.partition == BALANCED:  # the module deals as its caller does
        torch.manual_seed(3)
        assert torch.equal(module(mine, partition=partition, **where), out)
    out.backward(ringray.shard(dout, pad_value=NAN, **more))
    padding = ringray.shard(torch.zeros(1, seq_len), pad_value=1, **more)[0] == 1
    assert (out[:, padding] == 0).all()
    assert (mine.grad[:, padding] == 0).all()
    if group is None:
        sum_gradients(module)
    return {
        "out": ringray.unshard(out.detach(), seq_len=seq_len, **more),
        "x": ringray.unshard(mine.grad, seq_len=seq_len, **more),
        **gradients(module),
    }


def loss_is_global(rank: int, size: int) -> None:
    """The mean over every token that counts, wherever it is; each rank has its part of dlogits."""
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(2, SEQ_LEN, 19, generator=rng)
    labels = torch.randint(0, 19, (2, SEQ_LEN), generator=rng)
    for turn, rows in enumerate((SEQ_LEN, 20, 1, 0, 30)):
        dtype = (torch.float32, torch.bfloat16)[turn // 2 % 2]
        name = ("contiguous", "striped", "contiguous", "striped", BALANCED)[turn]
        partition = dealt(name, SEQ_LEN, cu_seqlens=DOCUMENTS)
        chosen = labels.clone()
        chosen[:, rows:] = -100  # contiguous: some ranks keep nothing
        whole = logits.to(dtype).requires_grad_()
        want = F.cross_entropy(whole.float().flatten(0, 1), chosen.flatten(), reduction="sum")
        want = want / max(int((chosen != -100).sum()), 1)
        (dwhole,) = torch.autograd.grad(want, whole)
        for how, factor in (("sum", 1), ("mean", size)):
            mine = ringray.shard(whole.detach(), dim=1, partition=partition).requires_grad_()
            own = ringray.shard(chosen, dim=1, partition=partition, pad_value=-100)
            loss = ringray.sharded_cross_entropy(mine, own, gradients=how)  # type: ignore[arg-type]
            (2 * loss).backward()
            torch.testing.assert_close(loss, want, atol=1e-6, rtol=1e-6)
            full = ringray.unshard(mine.grad, dim=1, partition=partition, seq_len=SEQ_LEN)
            torch.testing.assert_close(full, 2 * factor * dwhole)
            everyone = [torch.empty_like(loss.detach()) for _ in range(size)]
            dist.all_gather(everyone, loss.detach())
            assert all(torch.equal(x, everyone[0]) for x in everyone)
            if rows == 0:
                assert loss.item() == 0
                assert (mine.grad == 0).all()


def checkpointing_changes_nothing(rank: int, size: int) -> None:
    """Recomputed layers give the same bits, and do not send again where attention is kept."""
    ways: list[Any] = [None, {}, {"context_fn": keep_attention}]
    for transport in ("ring", "allgather", "ulysses" if size <= 2 else "bidirectional"):
        found, sent = [], []
        for checkpointed in ways:
            model = Decoder(checkpointed=checkpointed, transport=transport)
            before = METER.sent_bytes
            found.append({"loss": Trainer(model).backward(), **gradients(model)})
            sent.append(METER.sent_bytes - before)
        for name, grad in found[0].items():
            assert torch.equal(grad, found[1][name]), name
            assert torch.equal(grad, found[2][name]), name
        assert sent[0] == sent[2]
        assert sent[1] > sent[0] or size == 1


def ddp(rank: int, size: int) -> None:
    """DDP averages over the ring, which ``gradients="mean"`` expects."""
    model = Decoder()
    want = trainer_alone(model)
    got = Trainer(DistributedDataParallel(model), gradients="mean")
    torch.testing.assert_close(got.backward(), want.backward())
    same_gradients(got.model, want.model)


def fsdp(rank: int, size: int) -> None:
    """Parameters sharded over the ring's own ranks."""
    model = Decoder(checkpointed={})
    want = trainer_alone(model)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ring",))
    got = Trainer(_sharded(model, mesh), gradients="mean")
    torch.testing.assert_close(got.backward(), want.backward())
    same_gradients(got.model, want.model)


def fsdp_of_rings(rank: int, size: int) -> None:
    """Data parallel 2 x rings of size / 2: hybrid sharding, and sharding over all ranks."""
    rings = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "ring"))
    flat = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    ring = rings["ring"].get_group()
    # Replica 0 trains on two rows, replica 1 on the next two, which have fewer labels.
    text = Text(first=2 * rings.get_local_rank("dp"))
    for mesh in (rings, flat):
        model = Decoder(group=ring)
        want = trainer_alone(model, Text(batch=4))
        got = Trainer(_sharded(model, mesh), text, group=ring, gradients="mean")
        torch.testing.assert_close(got.backward(), want.backward())
        same_gradients(got.model, want.model)


def _sharded(model: Decoder, mesh: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
