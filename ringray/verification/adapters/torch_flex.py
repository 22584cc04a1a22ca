"""PyTorch's FlexAttention on shards (``_ContextParallel`` and ``_context_parallel_shard``): keys
and values are gathered, and a block mask that knows causality and documents is dealt.

Causal calls of ``scaled_dot_product_attention`` run by it. On CPUs FlexAttention has no backward:
losses and gradients are left out there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ringray.models.sdpa import SdpaCall
from ringray.verification import defaults
from ringray.verification.adapters.shared import attention_is, documents_of, rows_of
from ringray.verification.adapters.torch_context_parallel import (
    TorchContextParallel,
    without_mask,
)

_ROWS = 2  # dimension of q, k and v (B, heads, S, D)
_BLOCK = 128  # tokens of a block of the mask: ranks hold whole ones


class _Flex(nn.Module):
    """FlexAttention as a module, which PyTorch's style puts hooks on."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return flex_attention(query, key, value, **options)


class TorchFlex(TorchContextParallel):
    """Routes a model over FlexAttention."""

    UNIT, SEQ_LEN = _BLOCK, 2 * _BLOCK

    def __init__(self) -> None:
        super().__init__()
        self.mask: Any = None
        self.attention: nn.Module = _Flex()

    def prepare(self, model: nn.Module) -> nn.Module:
        """Forms the mesh of all ranks, and puts the hooks on FlexAttention."""
        model = super().prepare(model)
        assert self.mesh is not None
        kinds = torch_ring._ContextParallel.AttentionType
        style = torch_ring._ContextParallel(_ROWS, kinds.FLEX)
        self.attention = parallelize_module(_Flex(), self.mesh, style)
        # Compiling takes longer than masks of these sizes do.
        vars(torch_ring)["_compiled_create_block_mask"] = create_block_mask
        return model

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Deals a batch and its mask, a head and a tail block to each rank."""
        assert self.mesh is not None
        size, device = batch["input_ids"].shape[1], batch["input_ids"].device
        document = documents_of(batch)

        def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (document[query] == document[key])

        whole = create_block_mask(seen, 1, 1, size, size, device=device.type)
        dealt: dict[str, Any] = rows_of(batch)
        balancer = _HeadTailLoadBalancer(size, self.mesh.size(), device)
        dims = [_ROWS, *[1] * len(dealt)]
        self.mask, *rows = torch_ring._context_parallel_shard(
            self.mesh, [whole, *dealt.values()], dims, balancer
        )
        dealt = dict(zip(dealt, rows, strict=True))
        return self.unmasked(dealt)  # the block mask is the only one

    def context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Routes attention."""
        return attention_is(without_mask(self._attend))

    def step(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Runs a forward; on CPUs without a loss."""
        on_cpus = batch["input_ids"].device.type == "cpu"
        with torch.set_grad_enabled(not on_cpus):
            out = defaults.step(model, batch)
        return out | {"loss": None} if on_cpus else out

    def _attend(self, call: SdpaCall) -> Any:
        if not call.is_causal:
            raise ValueError("got attention that is not causal: this adapter's mask is")
        return self.attention(*call[:3], block_mask=self.mask, scale=call.scale)
