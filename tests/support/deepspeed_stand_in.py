"""A stand-in for DeepSpeed, which is too large to install for one test; ``as_package`` puts it into
a folder as the package ``deepspeed``.

It has what ``hf-ulysses`` calls, with the names and the order of the arguments in DeepSpeed 0.19.8,
and computes the same by our ring: contiguous shards, whose documents begin where positions do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"


def as_package(folder: Path) -> None:
    """Writes the package into a folder of ``sys.path``."""
    text = f"import sys\nimport {__name__} as whole\nfrom {__name__} import *\n"
    (folder / "deepspeed.py").write_text(f"{text}sys.modules[{_ULYSSES!r}] = whole\n")


def init_distributed(dist_backend: str | None = None, verbose: bool = True) -> None:
    assert dist_backend == dist.get_backend()


class UlyssesSPAttentionHF:
    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
    ) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        assert sequence_parallel_size == dist.get_world_size()
        cls.rows = micro_batch_size
        ALL_ATTENTION_FUNCTIONS[core_attn_implementation] = cls.attend

    @classmethod
    def attend(
        cls, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        *, scaling: float, position_ids: Tensor, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        import ringray

        assert len(query) == cls.rows
        parts = [torch.empty_like(position_ids) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, position_ids.contiguous())
        begins = (torch.cat(parts, 1)[0] == 0).nonzero()[:, 0]
        ends = [*begins.tolist(), query.shape[2] * len(parts)]
        out = ringray.ring_attention(
            query,
            key,
            value,
            scale=scaling,
            cu_seqlens=ends,
            partition="contiguous",
            transport="ulysses",
        )
        return out.transpose(1, 2), None
