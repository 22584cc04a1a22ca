"""Ulysses of DeepSpeed (``UlyssesSPAttentionHF``), as Accelerate's ``ParallelismConfig(sp_size=)``
and transformers' ``Trainer`` put it into a model: contiguous shards, which exchange heads for rows
around the model's own attention."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from ringray.verification import defaults
from ringray.verification.adapters.shared import chunked


class UlyssesAdapter:
    """Routes a Hugging Face model over DeepSpeed's Ulysses."""

    PACKAGE = "deepspeed"
    BATCH = 1  # rows, which it is told before it sees any

    def prepare(self, model: nn.Module) -> nn.Module:
        """Registers Ulysses in the place of the model's attention."""
        if not defaults.is_transformers(model):
            raise ValueError(f"got {type(model).__name__}, expected a model of transformers")
        import deepspeed
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model,
            core_attn_implementation=model.config._attn_implementation,  # type: ignore[union-attr]
            sequence_parallel_size=dist.get_world_size(),
            micro_batch_size=self.BATCH,
        )
        return model

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Deals equal contiguous shards; labels are the shifted ones."""
        return chunked(batch, dim=1)
