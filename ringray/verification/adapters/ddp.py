"""PyTorch's ``DistributedDataParallel``: each rank has some rows, and all of their tokens."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class DdpAdapter:
    """Deals rows of a batch."""

    BATCH = 24  # rows, which 2, 3, 4, 6 or 8 ranks share evenly

    def prepare(self, model: nn.Module) -> nn.Module:
        """Wraps the model, whose gradients are then averaged."""
        return DistributedDataParallel(model)

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Deals the rows in blocks; their loss is the mean over labels of all ranks."""
        rows, ranks = len(batch["input_ids"]), dist.get_world_size()
        if rows % ranks:
            raise ValueError(f"a batch of {rows} rows: expected a multiple of {ranks} ranks")
        # With labels, models of transformers average over the labels of their own rank.
        dealt = {name: x for name, x in batch.items() if x.dim() > 1 and name != "labels"}
        return {name: x.chunk(ranks)[dist.get_rank()] for name, x in dealt.items()}
