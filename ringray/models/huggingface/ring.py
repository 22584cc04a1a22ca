"""The layout of a batch on a ring, as it travels through a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ringray import partition as partitions
from ringray import transport as transports
from ringray.comm.ring import RingGroup
from ringray.partition import Partitioning
from ringray_kernels.config import Blocks

NAME = "ringray"
IGNORED = -100  # label that transformers' losses skip
CACHE = "ringray_cache"  # attribute of the keys of a step: the ``ShardedKV`` that they belong to


@dataclass(frozen=True)
class Ring:
    """The layout of one batch on a ring; the ``ring`` argument of the model's forward.

    ``shard_batch`` makes it. Make one yourself if a data loader deals the tokens, and call
    ``check(model, ring)`` first.

    ``seq_len``: true global length (tokens). ``cu_seqlens``: boundaries of packed documents from 0
    to ``seq_len``, shared by all batch rows or one tuple for each, or None. ``last_position``: the
    largest of the whole batch; None is ``seq_len - 1``. ``gradients``: as in ``shard_batch``.
    ``pooled``: (B,) whether this rank holds the token that a model pools, for each batch row. The
    others are as in ``ringray.ring_attention``, for every layer.
    """

    seq_len: int
    cu_seqlens: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    group: RingGroup = None
    partition: Partitioning = partitions.DEFAULT
    transport: str = transports.DEFAULT
    backend: str = "auto"
    blocks: Blocks | int | None = None
    prefix: tuple[int, ...] | None = None
    last_position: int | None = field(default=None, compare=False)
    gradients: Literal["sum", "mean"] = field(default="sum", compare=False)
    pooled: Tensor | None = field(default=None, compare=False)

    @property
    def layout(self) -> dict[str, Any]:
        """Returns the arguments that say how rows are dealt."""
        return {"partition": self.partition, "group": self.group, "seq_len": self.seq_len}


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Returns the transformers model in ``model``, a wrapper perhaps, that attends by a ring; other
    models may be there too, such as one of images."""
    inner = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    by_ring = [m for m in inner if m.config._attn_implementation == NAME]
    if not by_ring:
        implementation = inner[0].config._attn_implementation if inner else None
        raise ValueError(
            f"model: attends by {implementation!r}, expected {NAME!r}; make it with "
            f"attn_implementation={NAME!r}, from a config that no other model shares"
        )
    return by_ring[0]


def padding_token(model: PreTrainedModel) -> int | None:
    """Returns the number of the token that stands for padding, if the model has one."""
    return getattr(model.config.get_text_config(), "pad_token_id", None)


def said(x: Tensor) -> str:
    """Describes a tensor in a message."""
    return f"{x.dtype} of shape {tuple(x.shape)}"


def digest(x: Tensor | None) -> str:
    """Returns a text that another tensor does not have, but for a chance of 2 ** -64."""
    if x is None:
        return "none"
    factors = (
        torch.arange(1, x.numel() + 1, dtype=torch.int64, device=x.device) * 0x9E3779B97F4A7C1 | 1
    )
    values = x.flatten().view(torch.int32) if x.dtype == torch.float32 else x.flatten()
    return f"{said(x)} {int(((values.long() + 1) * factors).sum())}"
