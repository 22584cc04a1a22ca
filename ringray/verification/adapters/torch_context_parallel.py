"""PyTorch's ``context_parallel``: it patches ``scaled_dot_product_attention`` and deals buffers,
a head and a tail block to each rank.

Its dispatch has no rule for the kernel of CPUs. There its own ring (``_templated_ring_attention``
and its backward) is called with that kernel, so what is verified on CPUs is PyTorch's dealing,
loop, merging and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from ringray.verification import defaults

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_HEADS, _ROWS = 1, 2  # dimensions of q, k and v (B, heads, S, D)


class TorchContextParallel:
    """Routes a model over PyTorch's ring; ``rotation``: how keys travel, ``allgather`` or
    ``alltoall``."""

    UNIT = 2  # blocks of a rank

    def __init__(self, rotation: str = "allgather") -> None:
        if rotation not in ("allgather", "alltoall"):
            raise ValueError(f"got {rotation!r}, expected 'allgather' or 'alltoall'")
        self.rotation, self.seq_len = rotation, 0
        self.transformers = False
        self.mesh: DeviceMesh | None = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Forms the mesh of all ranks."""
        self.transformers = defaults.is_transformers(model)
        device = next(model.parameters()).device.type
        self.mesh = init_device_mesh(device, (dist.get_world_size(),))
        torch_ring.set_rotate_method(self.rotation)
        return model

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Deals a batch as the buffers of the context; packed documents would need a mask, which
        PyTorch's ring does not take."""
        if "cu_seqlens" in batch:
            raise ValueError("PyTorch's context_parallel takes no mask: expected whole sequences")
        dealt = self.buffers(batch)
        if self.transformers:  # without it, it takes rows that are out of order for documents
            dealt["attention_mask"] = torch.ones_like(dealt["input_ids"])
        return dealt

    def buffers(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's rows; labels are the shifted ones."""
        self.seq_len = batch["input_ids"].shape[1]
        dealt = {k: x.clone() for k, x in batch.items() if x.dim() > 1 and k != "labels"}
        rows = list(dealt.values())
        with self.ring(buffers=rows, buffer_seq_dims=[1] * len(rows), no_restore_buffers=set(rows)):
            return dealt

    def ring(self, **buffers: Any) -> AbstractContextManager[Any]:
        """Returns PyTorch's context."""
        assert self.mesh is not None
        return context_parallel(self.mesh, **buffers)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Routes attention; a buffer tells PyTorch the length of the sequence."""
        assert self.mesh is not None
        length = torch.empty(self.seq_len, dtype=torch.int8, device=self.mesh.device_type)
        with self.ring(buffers=[length], buffer_seq_dims=[0]):
            if self.mesh.device_type != "cpu":
                yield
                return
            with defaults.attention_is(without_mask(self._on_cpus)):
                yield

    def _on_cpus(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
    ) -> Tensor:
        assert self.mesh is not None
        out: Tensor = _OnCpus.apply(q, k, v, self.mesh.get_group(), is_causal, scale)
        return out


def without_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the arguments of ``scaled_dot_product_attention`` that calls
    ``function(q, k, v, is_causal, scale)``, with as many heads in each, and refuses masks."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if attn_mask is not None or dropout_p:
            raise NotImplementedError("this adapter takes no mask and no dropout of attention")
        groups = query.shape[_HEADS] // key.shape[_HEADS]
        key, value = (x.repeat_interleave(groups, _HEADS) for x in (key, value))
        return function(query, key, value, is_causal, scale)

    return attend


class _OnCpus(torch.autograd.Function):
    """PyTorch's ring with its kernel of CPUs."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, *how: Any
    ) -> Tensor:
        is_causal, scale = how
        out, lse = torch_ring._templated_ring_attention(
            group, _ROWS, _KERNEL, q, k, v, is_causal=is_causal, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.is_causal, ctx.scale = group, is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = torch_ring._templated_ring_attention_backward(
            ctx.group, _ROWS, _BACKWARD, grad, "grad_out", q, k, v, out, lse, ctx.is_causal,
            dropout_p=0.0, scale=ctx.scale,
        )  # fmt: skip
        return *gradients[:3], None, None, None
