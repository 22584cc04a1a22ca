"""PyTorch's ``context_parallel``: it patches ``scaled_dot_product_attention`` and deals buffers,
a head and a tail block to each rank.

Its dispatch has no rule for the kernel of CPUs. There its own ring (``_templated_ring_attention``
and its backward) is called with that kernel, so what is verified on CPUs is PyTorch's dealing,
loop, merging and backward.

Accelerate's ``ParallelismConfig(cp_size=)`` is the same, around which Accelerate drops the masks of
transformers' models and wraps the model in FSDP2. It refuses CPUs. There an ``Accelerator`` gets
the configuration after its checks, and wraps the model in DDP: hooks, contexts and dealing are what
a GPU runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from ringray.models.sdpa import SdpaCall
from ringray.verification.adapters.shared import attention_is, rows_of
from ringray.verification.defaults import is_transformers

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
        self.transformers = is_transformers(model)
        device = next(model.parameters()).device.type
        self.mesh = init_device_mesh(device, (dist.get_world_size(),))
        torch_ring.set_rotate_method(self.rotation)
        return model

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Deals a batch as the buffers of the context; packed documents would need a mask, which
        PyTorch's ring does not take."""
        if "cu_seqlens" in batch:
            raise ValueError("PyTorch's context_parallel takes no mask: expected whole sequences")
        return self.unmasked(self.buffers(batch))

    def unmasked(self, dealt: dict[str, Any]) -> dict[str, Any]:
        """Adds a mask that masks nothing: without one, models of transformers take rows that are
        out of order for documents."""
        if not self.transformers:
            return dealt
        return dealt | {"attention_mask": torch.ones_like(dealt["input_ids"])}

    def buffers(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's rows; labels are the shifted ones."""
        self.seq_len = batch["input_ids"].shape[1]
        dealt = {name: x.clone() for name, x in rows_of(batch).items()}
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
        on_cpus = self.mesh.device_type == "cpu"
        replaced = attention_is(without_mask(self._on_cpus)) if on_cpus else nullcontext()
        with self.ring(buffers=[length], buffer_seq_dims=[0]), replaced:
            yield

    def _on_cpus(self, call: SdpaCall) -> Tensor:
        assert self.mesh is not None
        group = self.mesh.get_group()
        out: Tensor = _OnCpus.apply(*call[:3], group, call.is_causal, call.scale)
        return out


class AccelerateAdapter(TorchContextParallel):
    """Routes a model as ``Accelerator.maybe_context_parallel`` does."""

    PACKAGE = "accelerate"
    accelerator: Any = None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Lets an ``Accelerator`` prepare the model."""
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.parallelism_config import ParallelismConfig, TorchContextParallelConfig
        from accelerate.state import AcceleratorState

        handler = TorchContextParallelConfig(cp_comm_strategy=self.rotation)
        config = ParallelismConfig(cp_size=dist.get_world_size(), cp_handler=handler)
        device = next(model.parameters()).device.type
        AcceleratorState._reset_state(reset_partial_state=True)  # it is one for each process
        if device == "cpu":
            self.accelerator = Accelerator(cpu=True)
            state = self.accelerator.state
            state.parallelism_config, state.device_mesh = config, config.get_device_mesh(device)
        else:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
            self.accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=config)
        self.mesh = self.accelerator.torch_device_mesh["cp"]
        prepared: nn.Module = self.accelerator.prepare(model)
        return prepared

    def shard(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Deals a batch as the buffers of the context; Accelerate refuses no documents."""
        return self.buffers(batch)

    def ring(self, **buffers: Any) -> AbstractContextManager[Any]:
        """Returns Accelerate's context."""
        context: AbstractContextManager[Any] = self.accelerator.maybe_context_parallel(**buffers)
        return context


def without_mask(function: Callable[[SdpaCall], Any]) -> Callable[..., Any]:
    """Returns a function with the arguments of ``scaled_dot_product_attention`` that calls
    ``function`` with as many heads in each tensor, and refuses masks."""

    def attend(*args: Any, **options: Any) -> Any:
        call = SdpaCall(*args, **options)
        if call.attn_mask is not None or call.dropout_p:
            raise ValueError("this adapter takes no mask and no dropout of attention")
        groups = call.query.shape[_HEADS] // call.key.shape[_HEADS]
        key, value = (x.repeat_interleave(groups, _HEADS) for x in (call.key, call.value))
        return function(call._replace(key=key, value=value))

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
