"""Our ring: Hugging Face models by ``shard_batch``, modules with our attention as they are, and
others in ``ringray.context_parallel``, which routes their ``scaled_dot_product_attention``; alone,
or with weights that FSDP2 shards over its ranks (``ringray.parallelize``)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention.deal import deal
from ringray.attention.sharding import shard
from ringray.models.decoder import Decoder
from ringray.models.sdpa import context_parallel
from ringray.nn import ContextParallelAttention
from ringray.partition import Partitioning
from ringray.training.mesh import Mesh, make_mesh
from ringray.training.parallelize import parallelize
from ringray.verification import defaults

_PADDING = {"labels": -100, "shift_labels": -100}
_SEQUENCE = 1  # dimension of (B, S)
# One rank deals a sequence of any length by this one.
_WITHOUT_PADDING = min(partitions.PARTITIONS.values(), key=lambda x: x.granularity).name
_OF_DOCUMENTS = "seq_len", "cu_seqlens"  # what our attention takes beside the rows


class RingAdapter:
    """Runs a model on the ring of ``group``; None: all ranks."""

    group: dist.ProcessGroup | None = None
    shards: dist.ProcessGroup | None = None  # over whose ranks the loss is a mean

    def __init__(
        self, partition: str = partitions.DEFAULT, transport: str = transports.DEFAULT
    ) -> None:
        partitions.get(partition)
        transports.parse(transport)
        self.partition, self.transport = partition, transport
        self.dealt: Partitioning = partition
        self.models: list[nn.Module] = []
        self.seq_len, self.documents = 0, None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Leaves the model as it is until a batch is dealt: a target that deals its batches itself
        has a ring of its own."""
        self.models.append(model)
        return model

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Deals a batch by the partition, and puts the models on the ring."""
        self.seq_len, self.documents = batch["input_ids"].shape[_SEQUENCE], batch.get("cu_seqlens")
        self.route()
        options: dict[str, Any] = {"group": self.group, "partition": self.partition}
        if defaults.is_transformers(self.model):
            from ringray.models import huggingface

            names = "input_ids", "labels", "position_ids", "cu_seqlens"
            options |= {name: batch[name] for name in names if name in batch}
            return huggingface.shard_batch(
                self.model, gradients="mean", transport=self.transport, **options
            )
        if self.partition == partitions.BALANCED:
            ranks = dist.get_world_size(self.group)
            options["partition"] = deal(self.seq_len, ranks, cu_seqlens=self.documents)
        self.dealt = options["partition"]
        dealt = {
            name: shard(x, dim=_SEQUENCE, pad_value=_PADDING.get(name, 0), **options)
            for name, x in batch.items()
            if x.dim() > 1
        }
        others = {name: x for name, x in batch.items() if x.dim() < 2}
        return dealt | others | {"seq_len": self.seq_len}

    @property
    def model(self) -> nn.Module:
        """Returns the model, if no function of the target prepared it in this one's place."""
        return self.models[-1] if self.models else nn.Identity()

    def route(self) -> None:
        """Puts Hugging Face models, or modules with our attention, on the ring."""
        for model in self.models:
            if defaults.is_transformers(model):
                from ringray.models import huggingface

                huggingface.register()
                model.set_attn_implementation(huggingface.NAME)  # type: ignore[operator]
            for part in _attention_of(model):
                part.options["transport"] = self.transport

    def context(self) -> AbstractContextManager[Any]:
        """Routes attention over the ring, where the model does not do so itself."""
        if not self.seq_len or defaults.is_transformers(self.model) or _attention_of(self.model):
            return nullcontext()
        return context_parallel(
            group=self.group,
            partition=self.dealt,
            transport=self.transport,
            seq_len=self.seq_len,
            cu_seqlens=self.documents,
        )

    def step(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Runs a forward; a ``Decoder`` computes its loss itself, without logits of all rows."""
        if dist.get_world_size() == 1:
            batch = self._alone(model, batch)
        elif self.seq_len:
            for part in _attention_of(model):
                part.partition = self.dealt
        where = {name: batch[name] for name in _OF_DOCUMENTS if name in batch}
        if not isinstance(model, Decoder):
            if not (_attention_of(model) and defaults.takes_all(model)):
                where = {}
            return defaults.step(model, batch, **where)
        with torch.no_grad():
            logits = model(batch["input_ids"], **where)
        labels: Tensor = batch["shift_labels"]
        loss = model(
            batch["input_ids"], labels=labels, shards=self.shards, gradients="mean", **where
        )
        return {"logits": logits, "loss": loss}

    def generate(self, model: nn.Module, input_ids: Tensor, new: int) -> Tensor:
        """Generates greedily, with keys and values that stay on the ring.

        Raises:
            ValueError: it is no model of transformers, one that does not step on the ring, or of a
                target that deals its batches itself.
        """
        if not (self.seq_len and defaults.is_transformers(model)):
            raise ValueError("the target has no function generate()")
        from ringray.models import huggingface

        # No token ends a text, so that all of them are compared.
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
        tokens: Tensor = huggingface.generate(
            model,
            input_ids,
            max_new_tokens=new,
            group=self.group,
            partition=self.partition,
            transport=self.transport,
            **options,
        )
        return tokens

    def _alone(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns a batch for one process, whose model may be made for a ring."""
        if defaults.is_transformers(model):
            from ringray.models import huggingface

            if model.config._attn_implementation == huggingface.NAME:  # type: ignore[union-attr]
                model.set_attn_implementation("eager")  # type: ignore[operator]
        for part in _attention_of(model):
            part.partition = _WITHOUT_PADDING
        return batch | {"seq_len": batch["input_ids"].shape[_SEQUENCE]}


class ParallelizeAdapter(RingAdapter):
    """Runs a ``Decoder``, a model with our attention or one of Hugging Face on one ring."""

    mesh: Mesh | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shards the weights; others than these models are refused."""
        if self.mesh is None:
            self.mesh = make_mesh(device=next(model.parameters()).device.type)
            self.group, self.shards = self.mesh.ring, self.mesh.shards.get_group()
        super().prepare(model)
        self.route()
        return parallelize(model, self.mesh)


def _attention_of(model: nn.Module) -> list[ContextParallelAttention]:
    return [part for part in model.modules() if isinstance(part, ContextParallelAttention)]
