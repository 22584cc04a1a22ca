"""Options that a call leaves open: the tuned choice, where one holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ringray.tuning import lookup
from ringray.tuning import table as tuned
from ringray_kernels.api import Features, resolve_backend
from ringray_kernels.config import Blocks

if TYPE_CHECKING:
    from torch import Tensor

    from ringray.attention.arguments import Documents, Options
    from ringray.comm.ring import Comm
    from ringray_kernels.api import Features


_OF_MASK = ("causal", "window", "chunk", "prefix", "global_tokens")  # of what is tuned


def filled(
    q: Tensor,
    k: Tensor,
    asked: Features,
    documents: Documents,
    options: Options,
    comm: Comm,
    *,
    needs_grad: bool,
) -> Options:
    """Fills what ``options``, of the right types, leave open: the tuned choice or the default."""
    strategy_open = "auto" in (options.partition, options.transport)
    if not strategy_open and (options.blocks is not None or not lookup.anything_tuned()):
        return options
    backend = resolve_backend(options.backend, q, asked)
    name = torch.cuda.get_device_name(q.device) if q.device.type == "cuda" else "cpu"
    found = lookup.for_process(
        tuned.buckets(
            ring_size=comm.world_size,
            threads=0 if q.device.type == "cuda" else torch.get_num_threads(),
            dtype=str(q.dtype).removeprefix("torch."),
            seq_len=options.seq_len or comm.world_size * q.shape[2],
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[3],
            documents=documents,
            backward=needs_grad,
            **{name: getattr(options, name) for name in _OF_MASK},
        ),
        name, options.partition, options.transport, options.backward, backend,
        options.backend == "auto",
    )  # fmt: skip
    options = options._replace(
        partition=found.partition, transport=found.transport, backward=found.backward
    )
    if options.blocks is not None or asked != Features(q.shape[3]):
        return options  # choices are tuned for plain attention
    try:
        backend = resolve_backend(found.backend, q, asked)
    except (ImportError, ValueError) as error:
        lookup.logger.warning("ring_attention: the tuned backend is not used: %s", error)
        return options
    blocks = Blocks.parse(found.blocks) if isinstance(found.blocks, str) else found.blocks
    return options._replace(backend=backend, blocks=blocks)
