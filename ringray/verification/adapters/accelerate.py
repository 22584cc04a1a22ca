"""Accelerate's ``ParallelismConfig(cp_size=)``: PyTorch's ``context_parallel``, around which
Accelerate drops the masks of transformers' models and wraps the model in FSDP2.

Accelerate refuses it on CPUs. There an ``Accelerator`` gets the configuration after its checks, and
wraps the model in DDP: hooks, contexts and dealing are what a GPU runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn

from ringray.verification.adapters.torch_context_parallel import TorchContextParallel
from ringray.verification.target import installed


class AccelerateAdapter(TorchContextParallel):
    """Routes a model as ``Accelerator.maybe_context_parallel`` does."""

    def __init__(self, *rotation: str) -> None:
        super().__init__(*rotation)
        installed("accelerate")
        self.accelerator: Any = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Lets an ``Accelerator`` prepare the model."""
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.parallelism_config import ParallelismConfig, TorchContextParallelConfig
        from accelerate.state import AcceleratorState

        handler = TorchContextParallelConfig(cp_comm_strategy=self.rotation)
        config = ParallelismConfig(cp_size=dist.get_world_size(), cp_handler=handler)
        device = next(model.parameters()).device.type
        AcceleratorState._reset_state(reset_partial_state=True)  # it is one for each process
        if device == "cpu":
            self.accelerator = Accelerator(cpu=True)
            state = self.accelerator.state
            state.parallelism_config, state.device_mesh = config, config.get_device_mesh(device)
        else:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
            self.accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=config)
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
