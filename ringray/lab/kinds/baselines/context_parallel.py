"""PyTorch's experimental context_parallel on the same ring, in its default settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from ringray.lab.kinds.base import RankContext
from ringray.lab.trial.config import TrialConfig


def prepare(
    config: TrialConfig, context: RankContext, q: Tensor, k: Tensor, v: Tensor
) -> Callable[[], Tensor]:
    """Returns a function that attends to this rank's shard, within ``around``."""

    def attend() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=config.problem.heads != config.problem.kv_heads
        )

    return attend


@contextmanager
def around(config: TrialConfig, context: RankContext, rows: int) -> Iterator[None]:
    """Lets SDPA attend to the shards of all ranks, ``rows`` each, in both passes."""
    assert context.group is not None
    mesh = DeviceMesh.from_group(context.group, context.device.type)
    # The shards are dealt already; a buffer without elements tells their whole length.
    length = torch.empty(rows * config.ring.size, 0, device=context.device)
    with context_parallel(mesh, buffers=[length], buffer_seq_dims=[0]):
        yield
