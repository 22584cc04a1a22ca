"""Choices that a call leaves open: the tuned one, where one holds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ringray.traffic.deal import Deal
from ringray.tuning import lookup
from ringray.tuning import table as tuned
from ringray_kernels.api import Features, resolve_backend
from ringray_kernels.config import Blocks

if TYPE_CHECKING:
    from ringray.attention.call import Call, InputSizes
    from ringray.comm.ring import Comm


def filled(call: Call, sizes: InputSizes, comm: Comm, *, needs_grad: bool) -> Call:
    """Returns ``call`` with the tuned choice, or the default, in place of what it leaves open."""
    asked = call.strategy
    strategy_open = "auto" in (asked.partition, asked.transport)
    if not strategy_open and (asked.blocks is not None or not lookup.anything_tuned()):
        return call
    features = call.score.features(sizes.value_dim)
    backend = resolve_backend(asked.backend, sizes, features)
    partition = asked.partition
    on_gpu = sizes.device.type == "cuda"
    tuned_choice = lookup.for_process(
        tuned.buckets(
            call.mask,
            ring_size=comm.world_size,
            threads=0 if on_gpu else torch.get_num_threads(),
            dtype=str(sizes.dtype).removeprefix("torch."),
            batch=sizes.batch,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            backward=needs_grad,
        ),
        torch.cuda.get_device_name(sizes.device) if on_gpu else "cpu",
        partition.rule if isinstance(partition, Deal) else partition,
        asked.transport,
        asked.backward,
        backend,
        asked.backend == "auto",
    )
    strategy = replace(tuned_choice, backend=asked.backend, blocks=asked.blocks)
    if isinstance(partition, Deal):
        strategy = replace(strategy, partition=partition)
    # Blocks are tuned for plain attention.
    if asked.blocks is None and features == Features(sizes.head_dim):
        try:
            backend = resolve_backend(tuned_choice.backend, sizes, features)
        except (ImportError, ValueError) as error:
            lookup.logger.warning("ring_attention: the tuned backend is not used: %s", error)
        else:
            blocks = tuned_choice.blocks
            blocks = Blocks.parse(blocks) if isinstance(blocks, str) else blocks
            strategy = replace(strategy, backend=backend, blocks=blocks)
    return replace(call, strategy=strategy)
