"""Choices that a call leaves open: the tuned one, where one holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ringray.tuning import lookup
from ringray.tuning import table as tuned
from ringray_kernels.api import Features, resolve_backend
from ringray_kernels.config import Blocks

if TYPE_CHECKING:
    from torch import Tensor

    from ringray.attention.call import Call
    from ringray.comm.ring import Comm


def filled(q: Tensor, k: Tensor, v: Tensor, call: Call, comm: Comm, *, needs_grad: bool) -> Call:
    """Returns ``call`` with the tuned choice, or the default, in place of what it leaves open.

    Shapes: ``q`` (B, Hq, S, D), ``k`` (B, Hkv, S, D), ``v`` (B, Hkv, S, Dv).
    """
    asked = call.strategy
    strategy_open = "auto" in (asked.partition, asked.transport)
    if not strategy_open and (asked.blocks is not None or not lookup.anything_tuned()):
        return call
    features = call.score.features(v.shape[3])
    backend = resolve_backend(asked.backend, q, features)
    on_gpu = q.device.type == "cuda"
    tuned_choice = lookup.for_process(
        tuned.buckets(
            call.mask,
            ring_size=comm.world_size,
            threads=0 if on_gpu else torch.get_num_threads(),
            dtype=str(q.dtype).removeprefix("torch."),
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            head_dim=q.shape[3],
            backward=needs_grad,
        ),
        torch.cuda.get_device_name(q.device) if on_gpu else "cpu",
        asked.partition,
        asked.transport,
        asked.backward,
        backend,
        asked.backend == "auto",
    )
    strategy = replace(tuned_choice, backend=asked.backend, blocks=asked.blocks)
    # Blocks are tuned for plain attention.
    if asked.blocks is None and features == Features(q.shape[3]):
        try:
            backend = resolve_backend(tuned_choice.backend, q, features)
        except (ImportError, ValueError) as error:
            lookup.logger.warning("ring_attention: the tuned backend is not used: %s", error)
        else:
            blocks = tuned_choice.blocks
            blocks = Blocks.parse(blocks) if isinstance(blocks, str) else blocks
            strategy = replace(strategy, backend=backend, blocks=blocks)
    return replace(call, strategy=strategy)
