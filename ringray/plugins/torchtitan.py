"""``use_ring``: context parallelism of torchtitan on the ring.

torchtitan shards a batch, head and tail of the sequence together, which is the default partition,
and computes its loss per token of all ranks. Its inner attention, which gathers all keys and values
on every rank, is replaced by ``RingInnerAttention`` in the configuration, before a model is built.

Shape legend: B batch, L rows of this rank, N heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ringray import partition as partitions
from ringray import transport as transports
from ringray.attention import ring_attention
from ringray.attention.sharding import unshard

try:
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.protocols.module import Module
    from torchtitan.protocols.sharding import LocalMapConfig
except ImportError as error:
    raise ImportError(
        f"ringray.plugins.torchtitan: {error}; pip install 'torchtitan>=0.3'"
    ) from error

_BALANCER = "headtail"  # torchtitan's name of the default partition
_Config = TypeVar("_Config")


def use_ring(
    config: _Config, *, transport: str = transports.DEFAULT, backend: str = "auto"
) -> _Config:
    """Returns a ``Trainer.Config`` whose attention is a ring of its context parallel ranks.

    Documents, which torchtitan's dataloaders mark by positions that begin at 0 again, do not see
    each other, as in its own attention.

    Args:
        config: with the ``model_spec`` of a decoder whose attention is ``flex`` or ``varlen``; it
            is changed in place.
        transport, backend: as in ``ringray.ring_attention``, for every layer.

    Raises:
        ValueError: here, as the model is parallelized, or in its first forward: what a ring has
            not (docs/accelerate.md).
    """
    spec = cast("Any", config).model_spec
    if not isinstance(getattr(spec, "model", None), Decoder.Config):
        raise ValueError("config: got one without a decoder as its model_spec, expected one")
    for number, layer in enumerate(spec.model.layers):
        if layer.attention is None:
            raise ValueError(
                f"config: got layer {number} without attention, expected attention in each: others "
                "mix tokens of this rank only"
            )
        inner = layer.attention.inner_attention
        layer.attention.inner_attention = RingInnerAttention.Config(
            window=_window(inner), transport=transport, backend=backend
        )
    parallelize = spec.parallelize_fn

    def parallelize_on_ring(model: nn.Module, **arguments: Any) -> nn.Module:
        _join(model, arguments["parallel_dims"], arguments["parallelism"])
        # With one SPMD backend torchtitan wraps the inner attention that it knows, to gather keys.
        own = {"apply_cp_to_forward": lambda *_: None}
        with patch.dict(getattr(parallelize, "__globals__", {}), own):
            return cast("nn.Module", parallelize(model, **arguments))

    cast("Any", config).model_spec = replace(spec, parallelize_fn=parallelize_on_ring)
    return config


def _window(inner: Any) -> int | None:
    """Returns the window of an inner attention's configuration; refuses what a ring has not."""
    if type(inner) is FlexAttention.Config:
        return None
    if type(inner) is VarlenAttention.Config and inner.window_size[1] == 0:
        before = inner.window_size[0]
        return None if before < 0 else before
    raise ValueError(
        f"config: got inner attention {inner!r}, expected FlexAttention.Config, or "
        "VarlenAttention.Config with a window_size of (keys before a query or -1, 0)"
    )


def _join(model: nn.Module, parallel_dims: Any, parallelism: Any) -> None:
    """Gives the attention of a model, or of a stage of it, its ring, and finds documents."""
    if cast("Any", type(model)).get_attention_masks is not Decoder.get_attention_masks:
        raise ValueError(
            f"model: got {type(model).__name__}, which makes masks of its own, expected causal "
            "attention within documents, as of llama3, qwen3 and deepseek_v3"
        )
    balancer = parallelism.context_parallel_load_balancer
    if parallel_dims.cp_enabled and balancer != _BALANCER:
        raise ValueError(
            f"parallelism.context_parallel_load_balancer: got {balancer!r}, expected {_BALANCER!r}"
        )
    ring = parallel_dims.get_optional_mesh(["cp"], include_singleton_axes=True)
    for part in model.modules():
        if isinstance(part, RingInnerAttention):
            part.ring = ring

    def find_documents(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positions = args[1] if len(args) > 1 else kwargs.get("positions")
        if positions is None:
            return args, kwargs
        mine = positions.to_local() if isinstance(positions, DTensor) else positions
        return args, kwargs | {"attention_masks": _documents(mine, ring)}

    model.register_forward_pre_hook(find_documents, with_kwargs=True)


def _documents(positions: Tensor, ring: DeviceMesh) -> Tensor:
    """Returns the boundaries of documents, int64 (B, most of a row + 1) on the CPU, from positions
    (B, L)."""
    starts = unshard(positions, dim=1, group=ring).cpu() == 0
    starts[:, 0] = True  # the rest of a document that began in a sequence before
    rows = [row.nonzero().flatten() for row in starts]
    most, end = max(map(len, rows)), starts.shape[1]
    # Documents without a token fill up the rows that have fewer.
    filled = [nn.functional.pad(row, (0, most + 1 - len(row)), value=end) for row in rows]
    return torch.stack(filled)


class RingInnerAttention(Module):
    """Causal attention of one layer within documents, by the ring. ``ring``: the mesh of its
    context parallel ranks, which ``parallelize_fn`` sets."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Keywords of ``ringray.ring_attention``."""

        window: int | None = None
        transport: str = transports.DEFAULT
        backend: str = "auto"

        def build(self, **arguments: Any) -> Any:
            """Builds the module, whose keys and values stay sharded: the ring sends them."""
            if (layout := self.sharding_config) is not None:
                sharding = layout.in_src_shardings
                gradients = LocalMapConfig(in_grad_placements=tuple(sharding.values()))
                layout = replace(layout, in_dst_shardings=sharding, local_map=gradients)
            made = Module.Config.build(self, **arguments)
            made._sharding_config = layout
            return made

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.ring: DeviceMesh | None = None

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Tensor:
        """Returns (B, L, N, H); ``attention_masks``: boundaries of documents."""
        if names := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"inner attention: got {', '.join(names)}, which a ring has not")
        if self.ring is None:
            raise ValueError("model: got one that was not parallelized, expected parallelize_fn")
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out = ring_attention(
            q, k, v, scale=scale, cu_seqlens=attention_masks, group=self.ring,
            partition=partitions.DEFAULT,  # head and tail, as torchtitan shards
            window=self.config.window, transport=self.config.transport, backend=self.config.backend,
        )  # fmt: skip
        return cast("Tensor", out).transpose(1, 2)
