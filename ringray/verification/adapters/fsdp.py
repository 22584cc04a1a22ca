"""PyTorch's FSDP2: each rank has some rows and shards of the weights, layer by layer."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import fully_shard

from ringray.training.offload import layers_of
from ringray.verification.adapters.ddp import DdpAdapter


class FsdpAdapter(DdpAdapter):
    """Deals rows of a batch."""

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shards the weights of each layer of the model's longest list, and the rest together."""
        for layer in layers_of(model):
            fully_shard(layer)
        fully_shard(model)
        return model
