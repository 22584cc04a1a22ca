"""Checks of every rank of a real ring: compiled code gives the same bits as eager, in one graph."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringray
from ringray.nn import keep_attention
from ringray_kernels import testing
from tests.support.decoder import DOCUMENTS, SEQ_LEN, Decoder, Text, Trainer, gradients
from tests.support.ranks import Case

TRANSPORTS = (
    "ring", "bidirectional", "direct", "allgather", "ulysses", "hybrid:2", "double-ring:2",
    "staged",
)  # fmt: skip
BACKWARDS = ("planned", "reverse", "query-side")
MASKS: tuple[dict[str, Any], ...] = (
    {"window": 9}, {"cu": (0, 1, 33, 61), "prefix": (1, 9, 3)}, {"window": 5, "global_tokens": 4},
)  # fmt: skip


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in one graph, whatever was compiled before."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def attend(*tensors: Tensor, cases: tuple[Case, ...]) -> list[tuple[Tensor, Tensor]]:
    """Several problems in one graph: (out, lse) of each."""
    q, k, v, *cu = tensors
    boundaries = iter(cu)
    return [
        ringray.ring_attention(
            q, k, v, return_lse=True,
            **{**case.arguments, "cu_seqlens": next(boundaries) if case.cu else None},
        )
        for case in cases
    ]  # fmt: skip


def results(function: Callable[..., Any], cases: tuple[Case, ...]) -> list[Tensor]:
    """Everything that ``attend`` computes, and gradients of all problems together."""
    *qkv, dout = cases[0].shards()
    for x in qkv:
        x.requires_grad_()
    cu = [torch.tensor(case.cu) for case in cases if case.cu]
    found = function(*qkv, *cu, cases=cases)
    torch.autograd.backward([out for out, _ in found], [dout] * len(found))
    return [*(x.detach() for pair in found for x in pair), *(x.grad for x in qkv)]


def models(rank: int, size: int) -> None:
    """Compiles each change of scores, with every gradient; a loss of out and lse, or of lse."""
    asked: tuple[dict[str, Any], ...] = (
        {"with_dlse": True}, {"with_dlse": True, "backward": "query-side", "with_sinks": True},
        {"softcap": 2, "value_dim": 24, "with_sinks": True, "alibi": True},
        {"with_dlse": True, "transport": "hybrid:2"}, {"reach": 5, "value_dim": 8},
    )  # fmt: skip
    for turn, options in enumerate(asked):
        case = Case("zigzag", torch.bfloat16, heads=8, kv_heads=4, **options)
        both: list[list[Tensor]] = []
        for function in (ringray.ring_attention, compiled(ringray.ring_attention)):
            *qkv, dout = case.shards()
            learned = {"sinks": case.sinks, "distance_bias": case.table}
            learned = {name: x.requires_grad_() for name, x in learned.items() if x is not None}
            leaves = [x.requires_grad_() for x in (*qkv, *learned.values())]
            out, lse = function(*leaves[:3], return_lse=True, **case.arguments | learned)
            loss = {out: dout, lse: ringray.shard(case.dlse, dim=2)}
            if not case.with_dlse:
                del loss[lse]
            elif turn == 0:
                del loss[out]
            torch.autograd.backward([*loss], [*loss.values()])
            both.append([out, lse, *(x.grad for x in leaves)])  # type: ignore[list-item]
        same_bits(*both, case)


def transports(rank: int, size: int, *, every: bool = False) -> None:
    """Every transport, and ``every`` walk back and mask or one of them in turn: the same bits, or
    refusal."""
    ran = set()
    for turn, transport in enumerate(TRANSPORTS):
        usual = "query-side" if transport == "staged" else "planned"
        for backward in BACKWARDS if every else (usual,):
            arguments: dict[str, Any] = {"transport": transport, "backward": backward, "batch": 2}
            if transport == "ulysses":
                arguments["kv_heads"] = 4
            # Both are arguments of one operator, which a graph passes on as it does any others.
            masks = MASKS if every else MASKS[turn % len(MASKS) :][:1]
            cases = tuple(Case("zigzag", **arguments, **mask) for mask in masks)
            want, refusal = _or_refusal(attend, cases)
            got, refused = _or_refusal(compiled(attend), cases)
            assert refused == refusal, (transport, backward)
            same_bits(got, want, (transport, backward))
            ran |= set() if refusal else {transport, backward}
    assert ran >= set(TRANSPORTS)


def _or_refusal(function: Callable[..., Any], cases: tuple[Case, ...]) -> tuple[list[Tensor], str]:
    try:
        return results(function, cases), ""
    except ValueError as error:
        return [], str(error)


def same_bits(got: list[Tensor], want: list[Tensor], what: object) -> None:
    for at, (x, y) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(x, y), (what, at)


def modes(rank: int, size: int) -> None:
    """Without gradients, under autocast, at other lengths, and with one eager rank among others."""
    torch._dynamo.reset()
    function = torch.compile(ringray.ring_attention, fullgraph=True, backend="aot_eager")
    for rows in (8, 16, 24):
        q, k, v, dout = testing.make_inputs(1, 4, 2, rows, 16, torch.float32, seed=rank)
        want = ringray.ring_attention(q, k, v)
        assert torch.equal(function(q, k, v), want)
        q.requires_grad_()
        with torch.no_grad():
            out = function(q, k, v)
        assert not out.requires_grad
        assert torch.equal(out, want)
        (function if rank else ringray.ring_attention)(q, k, v).backward(dout)
        (mine,) = torch.autograd.grad(ringray.ring_attention(q, k, v), q, dout)
        assert torch.equal(q.grad, mine)
        with torch.autocast("cpu", torch.bfloat16):
            out = function(q, k, v)
            assert torch.equal(out, ringray.ring_attention(*(x.bfloat16() for x in (q, k, v))))


def _step(model: nn.Module, ids: Tensor, labels: Tensor, cu: Tensor | None) -> list[Tensor]:
    """One rank's results of a step: its loss, and the whole logits."""
    rows = ringray.shard(ids, dim=1)
    logits = model(rows, seq_len=SEQ_LEN, cu_seqlens=cu)
    loss = ringray.sharded_cross_entropy(logits, ringray.shard(labels, dim=1, pad_value=-100))
    return [loss, ringray.unshard(logits, dim=1, seq_len=SEQ_LEN)]


def whole_steps(rank: int, size: int) -> None:
    """Dealing, a model, its loss and putting together, in one graph; layers recomputed too."""
    for documents, checkpointed in (
        (None, None),
        (DOCUMENTS, {}),
        (None, {"context_fn": keep_attention}),
    ):
        text, found = Text(documents=documents), []
        for function in (_step, compiled(_step)):
            model = Decoder(checkpointed=checkpointed)
            loss, logits = function(model, text.ids, text.labels, text.cu_seqlens)
            (loss + logits.square().mean()).backward()
            found.append([loss, logits, *gradients(model).values()])
        same_bits(*found, (documents, checkpointed))


def _dealt_call(x: Tensor, cu: Tensor, deal: ringray.Deal, *, named: bool = False) -> list[Tensor]:
    """Attention of rows that are dealt, put together; ``named``: the call deals once more."""
    q, k, v = ringray.shard(x, dim=2, partition=deal).unflatten(1, (3, -1)).unbind(1)
    lse: Tensor
    out, lse = ringray.ring_attention(
        q, k, v, cu_seqlens=cu, partition="balanced" if named else deal, transport="direct",
        seq_len=x.shape[2], return_lse=True,
    )  # fmt: skip
    return [ringray.unshard(out, dim=2, partition=deal), lse]


def _dealt_step(model: nn.Module, text: Tensor, cu: Tensor, deal: ringray.Deal) -> list[Tensor]:
    """A step of a decoder on rows that are dealt."""
    rows = ringray.shard(text, dim=1, partition=deal)
    labels = ringray.shard(text, dim=1, partition=deal, pad_value=-100)
    logits = model(rows, cu_seqlens=cu, partition=deal)
    loss = ringray.sharded_cross_entropy(logits, labels)
    return [loss, ringray.unshard(logits, dim=1, partition=deal)]


def deals(rank: int, size: int) -> None:
    """Six batches, each with a deal of its own, another number of documents and other boundaries:
    the bits of eager code, and nothing is compiled after the second."""
    draw = random.Random(0)
    cuts = [sorted(draw.sample(range(1, SEQ_LEN), count)) for count in (1, 3, 2, 5, 1, 4)]
    batches = [(0, *cut, SEQ_LEN) for cut in cuts]
    model, rows = Decoder(), torch.randn(1, 6, SEQ_LEN, 16, requires_grad=True)
    words = Text().ids
    for of_model, function in (
        (False, _dealt_call), (False, partial(_dealt_call, named=True)), (True, _dealt_step),
    ):  # fmt: skip
        run, graphs = compiled(function), []
        for cu in batches:
            bounds, deal = torch.tensor(cu), ringray.deal(SEQ_LEN, size, cu_seqlens=cu)
            both = []
            for each in (function, run):
                leaves = [*model.parameters()] if of_model else [rows]
                inputs = (model, words) if of_model else (rows,)
                results = each(*inputs, bounds, deal)
                whole = sum(x.square().mean() for x in results)
                both.append([*results, *torch.autograd.grad(whole, leaves)])
            same_bits(*both, (function, cu))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert graphs[-1] == graphs[1], (function, graphs)
        assert graphs[0] > 0


def ddp(rank: int, size: int) -> None:
    """DDP, which cuts the graph where its buckets end."""
    distributed: Any = torch.distributed
    distributed._DEFAULT_FIRST_BUCKET_BYTES = 1 << 12  # of a megabyte, there would be one bucket
    found = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        model: nn.Module = DistributedDataParallel(Decoder(), bucket_cap_mb=0.01)
        trained = torch.compile(model, backend="aot_eager") if compile_it else model
        loss = Trainer(trained, gradients="mean").backward()
        found.append([loss, *gradients(model).values()])
    same_bits(*found, "ddp")


def fsdp(rank: int, size: int) -> None:
    """FSDP2 around compiled blocks, each one graph."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ring",))
    found = []
    for compile_it in (False, True):
        torch._dynamo.reset()
        model = Decoder(checkpointed={})
        for block in model.blocks:
            if compile_it:
                block.compile(fullgraph=True, backend="aot_eager")
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        curve = Trainer(model, gradients="mean").curve(2)
        found.append(torch.tensor(curve))
    assert torch.equal(*found), found


def huggingface(rank: int, size: int) -> None:
    """An unmodified model, its mask functions looked at while it is traced."""
    from ringray.models import huggingface as hf
    from tests.support import huggingface_checks

    ids, labels = huggingface_checks.tokens()
    for family, cuts in (("llama", huggingface_checks.CUTS), ("mistral", None)):
        found = []
        for compile_it in (False, True):
            model = huggingface_checks.tiny("ringray", family)
            cu = None if cuts is None else torch.tensor(cuts)
            batch = hf.shard_batch(model, ids, labels=labels, cu_seqlens=cu)
            out = (compiled(model) if compile_it else model)(**batch)
            out.loss.backward()
            found.append([out.loss, out.logits, *(p.grad for p in model.parameters())])
        same_bits(*found, family)
