"""PyTorch's DDP and FSDP2: each rank has some rows, and all of their tokens."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringray.training.offload import layers_of
from ringray.verification.adapters.shared import chunked


class DdpAdapter:
    """Deals rows of a batch."""

    BATCH = 24  # rows, which 2, 3, 4, 6 or 8 ranks share evenly

    def prepare(self, model: nn.Module) -> nn.Module:
        """Wraps the model, whose gradients are then averaged."""
        return DistributedDataParallel(model)

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Deals the rows in blocks; their loss is the mean over labels of all ranks."""
        return chunked(batch, dim=0)


class FsdpAdapter(DdpAdapter):
    """Deals rows of a batch, and the weights."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shards the weights of each layer of the model's longest list, and the rest together."""
        for layer in layers_of(model):
            fully_shard(layer)
        fully_shard(model)
        return model
