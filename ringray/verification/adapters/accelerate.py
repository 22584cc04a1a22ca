"""Accelerate's ``ParallelismConfig(cp_size=)``: PyTorch's ``context_parallel``, around which
Accelerate drops the masks of transformers' models and wraps the model in FSDP2, on CPUs in DDP."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn

from ringray.verification.adapters.torch_context_parallel import TorchContextParallel
from ringray.verification.target import installed


class AccelerateAdapter(TorchContextParallel):
    """Routes a model as ``Accelerator.maybe_context_parallel`` does."""

    def __init__(self, rotation: str = "allgather") -> None:
        super().__init__(rotation)
        installed("accelerate")
        self.accelerator: Any = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Lets an ``Accelerator`` prepare the model."""
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.parallelism_config import ParallelismConfig, TorchContextParallelConfig

        on_cpus = next(model.parameters()).device.type == "cpu"
        self.accelerator = Accelerator(
            cpu=on_cpus,
            fsdp_plugin=None if on_cpus else FullyShardedDataParallelPlugin(fsdp_version=2),
            parallelism_config=ParallelismConfig(
                cp_size=dist.get_world_size(),
                cp_handler=TorchContextParallelConfig(cp_comm_strategy=self.rotation),
            ),
        )
        self.mesh = self.accelerator.torch_device_mesh["cp"]
        prepared: nn.Module = self.accelerator.prepare(model)
        return prepared

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Deals a batch as the buffers of the context; Accelerate refuses no documents."""
        return self.buffers(batch)

    def ring(self, **buffers: Any) -> AbstractContextManager[Any]:
        """Returns Accelerate's context."""
        context: AbstractContextManager[Any] = self.accelerator.maybe_context_parallel(**buffers)
        return context
