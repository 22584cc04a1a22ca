"""Checks of every rank of a real ring: a ``DeviceMesh`` is the ring of its dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringray
import ringray.models.huggingface as hf
from tests.support.compile_checks import compiled
from tests.support.decoder import SEQ_LEN, Decoder, Text
from tests.support.huggingface_checks import tiny, tokens


def _meshes(size: int) -> DeviceMesh:
    """Rings of all ranks ("cp"), and of one ("dp")."""
    return init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp"))


def _attend(q: Tensor, group: Any) -> Tensor:
    mine = ringray.shard(q, dim=2, group=group)
    out = ringray.ring_attention(mine, mine, mine, group=group, seq_len=SEQ_LEN)
    return ringray.unshard(out, dim=2, seq_len=SEQ_LEN, group=group)


def _step(model: Decoder, ids: Tensor, labels: Tensor, group: Any) -> Tensor:
    """Returns the global loss of a model whose modules attend by ``group``."""
    mine = ringray.shard(ids, dim=1, group=group)
    targets = ringray.shard(labels, dim=1, group=group, pad_value=-100)
    return ringray.sharded_cross_entropy(model(mine, seq_len=SEQ_LEN), targets, group=group)


def _queries(rows: int = SEQ_LEN) -> Tensor:
    return torch.randn(1, 2, rows, 8, generator=torch.Generator().manual_seed(0))


def is_its_group(rank: int, size: int) -> None:
    """Everything that takes a group computes the same bits with the mesh that has it."""
    text = Text()
    for name in ("cp", "dp"):
        mesh, results = _meshes(size)[name], []
        for group in (mesh, mesh.get_group()):
            model = Decoder(group=group)
            loss = _step(model, text.ids, text.labels, group)
            loss.backward()
            cache = ringray.ShardedKV.empty(1, 2, 8, capacity=9, dtype=torch.float32, group=group)
            new = _queries(3)
            cache.append(new, new)
            decoded = ringray.ring_decode(new, cache, group=group)
            results.append(
                [_attend(_queries(), group), loss, decoded, *(p.grad for p in model.parameters())]
            )
        assert all(map(torch.equal, *results)), name


def of_a_model(rank: int, size: int) -> None:
    """Trains a Hugging Face model on a mesh, and generates by it."""
    model, (ids, labels) = tiny("ringray"), tokens(batch=1)
    mesh = _meshes(size)["cp"]
    results = []
    for group in (mesh, mesh.get_group()):
        batch = hf.shard_batch(model, ids, labels=labels, group=group)
        answer = hf.generate(model, ids, group=group, max_new_tokens=3)
        results.append([model(**batch).loss, answer])
    assert all(map(torch.equal, *results))


def is_compiled(rank: int, size: int) -> None:
    """Compiles one graph, which takes meshes as it takes groups."""
    meshes, text = _meshes(size), Text()
    for name in ("cp", "dp"):
        mesh = meshes[name]
        assert torch.equal(compiled(_attend)(_queries(), mesh), _attend(_queries(), mesh))
    step = (Decoder(group=meshes["cp"]), text.ids, text.labels, meshes["cp"])
    assert torch.equal(compiled(_step)(*step), _step(*step))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(_attend)(_queries(), meshes)


def of_pytorchs_context_parallel(rank: int, size: int) -> None:
    """PyTorch's call form, with its mesh first."""
    full = [_queries() + i for i in range(3)]
    q, k, v = (x.clone() for x in full)
    mesh = _meshes(size)["cp"]
    with ringray.context_parallel(
        mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2], no_restore_buffers={v}
    ):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    whole = ringray.unshard(out, dim=2, seq_len=SEQ_LEN, group=mesh)
    want = F.scaled_dot_product_attention(*full, is_causal=True)
    torch.testing.assert_close(whole, want, atol=1e-5, rtol=1e-5)
    assert q.shape[2] == SEQ_LEN > v.shape[2]


def has_one_dimension(rank: int, size: int) -> None:
    """Refuses a mesh of two, and one without this rank, before anything is sent."""
    meshes, q = _meshes(size), _queries()
    for call in (
        lambda: ringray.shard(q, dim=2, group=meshes),
        lambda: ringray.unshard(q, dim=2, group=meshes),
        lambda: ringray.ring_attention(q, q, q, group=meshes),
        lambda: ringray.context_parallel(meshes).__enter__(),
        lambda: hf.shard_batch(tiny("ringray"), tokens()[0], group=meshes),
    ):
        with pytest.raises(ValueError, match="several dimensions, expected one of them"):
            call()
    first = DeviceMesh("cpu", [0])
    if rank:
        with pytest.raises(ValueError, match="without this rank"):
            ringray.shard(q, dim=2, group=first)
