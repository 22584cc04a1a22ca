"""``ringray.parallelize``: our ring, with weights sharded over its ranks by FSDP2."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from ringray.training.mesh import Mesh, make_mesh
from ringray.training.parallelize import parallelize
from ringray.verification.adapters.ring import RingAdapter


class ParallelizeAdapter(RingAdapter):
    """Runs a ``Decoder``, a model with our attention or one of Hugging Face on one ring."""

    mesh: Mesh | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shards the weights; others than these models are refused."""
        if self.mesh is None:
            self.mesh = make_mesh(device=next(model.parameters()).device.type)
            self.group = self.mesh.ring
        super().prepare(model)
        self.route()
        return parallelize(model, self.mesh)

    @property
    def shards(self) -> dist.ProcessGroup | None:
        """Returns the ranks over which the loss is a mean."""
        return None if self.mesh is None else self.mesh.shards.get_group()
