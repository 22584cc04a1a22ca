"""``parallelize``: a model on a mesh of ranks.

Tensor parallelism splits heads and the MLP and leaves the stream between layers sharded over rows
(sequence parallel); FSDP2 shards weights over DP x CP and averages gradients, so losses are made
with ``gradients="mean"`` over ``mesh.shards``.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ringray.attention.agreement import AgreedCall, agree, alone, refusing
from ringray.comm.ring import connect
from ringray.models.decoder import Decoder
from ringray.models.trial import refuse_unrouted
from ringray.nn import ContextParallelAttention
from ringray.training.mesh import Mesh
from ringray.training.offload import layers_of
from ringray.training.offload import offload as send_away
from ringray.training.recipe import check_split

_ROWS = 1  # dimension of (B, S, H)
_FEW = 24  # tokens of a trial of a Hugging Face model


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    inputs: tuple[Any, ...] | None = None,
    offload: bool = False,
) -> nn.Module:
    """Returns ``model`` with its attention on the mesh's ring and its weights sharded.

    Args:
        model: a ``Decoder``, a model with ``ContextParallelAttention``, or one of Hugging Face with
            ``attn_implementation="ringray"``, whose batches come from ``hf.shard_batch(...,
            group=mesh.ring, gradients="mean")``. Every rank has the same weights: those of another
            seed are refused.
        mesh: the ranks; TP needs a ``Decoder``.
        dtype: of computation and of gathered weights; their reduction and the optimizer stay in
            the weights' own. None: the weights'.
        inputs: what its forward takes on a rank, by position, a few rows of it, in dictionaries
            too; None if token ids (B, S), or a stream (B, S, H), and positions (B, S) do. The model
            is tried with it, on a ring of several ranks with NaN in one row.
        offload: inputs of layers leave the device until their backward pass, as by
            ``ringray.offload``; the layers are checkpointed.

    Raises:
        ValueError: on every rank, tokens of a model meet elsewhere than on the mesh's ring; TP does
            not divide heads, K/V heads or the MLP, or the model has no TP.
    """
    comm = connect(None)
    with refusing(comm):
        if mesh.degrees.tp > 1:
            if not isinstance(model, Decoder):
                raise ValueError(
                    f"tp: got {mesh.degrees.tp}, expected 1 for {type(model).__name__}; only a "
                    "Decoder has tensor parallelism here"
                )
            check_split(model.size, mesh.degrees.tp)
        name = type(model).__name__
        agree(comm, AgreedCall("parallelize", model=name, dtype=dtype, offload=offload))
    for part in model.modules():
        if isinstance(part, ContextParallelAttention):
            part.group = mesh.ring
    if dist.get_world_size() > 1:
        _refuse_unrouted(model, mesh.ring, inputs)
    # Each rank keeps a part of its own weights.
    for group in (mesh.shards.get_group(), mesh.group("tp")):
        with refusing(sharing := connect(group)):
            agree(sharing, AgreedCall("parallelize", weights=_digest(model)))
    if mesh.degrees.tp > 1:
        _split(cast("Decoder", model), mesh)
    if offload:
        send_away(model, group=mesh.stage)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh.shards, "mp_policy": policy}
    for layer in layers_of(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def _digest(model: nn.Module) -> list[tuple[Any, ...]]:
    """Returns names, shapes and dtypes of parameters, and sums of their bytes: exact in any order,
    on any device."""

    def total(weight: torch.Tensor) -> int | None:
        if weight.is_meta or type(weight.data) is not torch.Tensor:
            return None
        return int(weight.detach().flatten().view(torch.uint8).sum(dtype=torch.int64))

    return [(name, tuple(x.shape), x.dtype, total(x)) for name, x in model.named_parameters()]


def _refuse_unrouted(model: nn.Module, ring: dist.ProcessGroup, inputs: Any) -> None:
    """Raises ValueError on all ranks if tokens of the model meet elsewhere than on the ring."""
    reason, sharded = cast("str | None", None), dist.get_world_size(ring) > 1
    reasons: list[str | None] = [None] * dist.get_world_size()
    hf = sys.modules.get("transformers.modeling_utils")  # imported where there is such a model
    attending = [
        part.config._attn_implementation
        for part in model.modules()
        if hf and isinstance(part, hf.PreTrainedModel)
    ]
    own = True  # else batches of transformers bring the ring
    try:
        with alone():
            if attending:
                from ringray.models import huggingface

                # With inputs, it may be a part that gets no sharded rows, such as one of images.
                own = inputs is not None and huggingface.NAME not in attending
                if sharded and not own:
                    huggingface.check(model, huggingface.Ring(_FEW, group=ring), alone=True)
            if own:
                refuse_unrouted(model, ring, inputs, sharded=sharded)
    except Exception as error:  # of one rank: the others would wait for it
        reason = str(error)
        if not isinstance(error, ValueError):
            reason = f"model: a trial of {type(model).__name__} fails: {error!r}"
    dist.all_gather_object(reasons, reason)
    if any(reasons):
        raise ValueError(next(filter(None, reasons)))


def _split(model: Decoder, mesh: Mesh) -> None:
    rows = Shard(_ROWS)

    def gathered() -> ParallelStyle:
        """Makes a module take rows of all, and sums and shards its result: it may compute some
        rows at a time."""
        whole: dict[str, Any] = {"desired_input_layouts": Replicate(), "use_local_input": True}
        summed: dict[str, Any] = {"output_layouts": Partial(), "desired_output_layouts": rows}
        return PrepareModuleInputOutput(input_layouts=rows, **whole, **summed)

    layer: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(use_local_output=True),
        "self_attn": gathered(),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=Partial()),
        "post_attention_layernorm": SequenceParallel(use_local_output=True),
        "mlp": gathered(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Partial()),
    }
    group = mesh.whole["tp"]
    for part in model.layers.values():
        parallelize_module(part, group, layer)
    outer: dict[str, ParallelStyle] = {}
    if model.embed_tokens is not None:
        outer["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=rows)
    if model.norm is not None:
        # The loss takes rows of all; the head gathers its logits.
        outer["norm"] = SequenceParallel(use_local_output=False)
        outer["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, group, outer)
    if model.norm is not None:
        cast("nn.Module", model.norm).register_forward_hook(_whole)


def _whole(_: nn.Module, __: Any, out: Any) -> Any:
    """Gathers the rows of a stream that TP sharded."""
    return out.full_tensor()
