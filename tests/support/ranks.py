"""Real rings for tests: processes in a gloo group, and one call of the op on them.

Starting processes costs seconds, so each ring is started once and does all its checks. A check is
a function ``(rank, size)``; whatever it raises fails the test that started the ring.
"""

from __future__ import annotations

import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ringray
from ringray_kernels import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ringray_kernels import Blocks

    Check = Callable[[int, int], None]

NAN = float("nan")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def on_ring(size: int, checks: Sequence[Check]) -> None:
    """Runs the checks on every rank of a ring of ``size`` processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(size, folder, tuple(checks)), nprocs=size)


def _rank(rank: int, size: int, folder: str, checks: tuple[Check, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=(Path(folder) / "store").as_uri(), rank=rank, world_size=size,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    try:
        for check in checks:
            try:
                check(rank, size)
            except Exception as error:
                raise AssertionError(
                    f"{check.__name__} on rank {rank} of {size}:\n{traceback.format_exc()}"
                ) from error
        dist.barrier()
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Case:
    """One call of the op. ``cu`` are document boundaries."""

    partition: str
    dtype: torch.dtype = torch.float32
    seq_len: int = 61
    causal: bool = True
    window: int | None = None
    cu: tuple[int, ...] | None = None
    backend: str = "aten"
    batch: int = 1
    seed: int = 0
    blocks: Blocks | int | None = None
    head_dim: int = HEAD_DIM
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    transport: str = "ring"
    backward: str = "auto"

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "partition": self.partition, "causal": self.causal, "window": self.window,
            "cu_seqlens": None if self.cu is None else torch.tensor(self.cu),
            "seq_len": self.seq_len, "backend": self.backend, "blocks": self.blocks,
            "transport": self.transport, "backward": self.backward,
        }  # fmt: skip

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return testing.make_inputs(
            self.batch, self.heads, self.kv_heads, self.seq_len, self.head_dim, self.dtype,
            seed=self.seed,
        )  # fmt: skip

    def shards(self, pad_value: float = NAN) -> list[Tensor]:
        """This rank's q, k, v, dout."""
        return [
            ringray.shard(x, dim=2, partition=self.partition, pad_value=pad_value)
            for x in self.inputs
        ]

    def run(self, pad_value: float = NAN) -> dict[str, Tensor]:
        """out, lse and gradients of this rank's shard; padding holds ``pad_value``."""
        *qkv, dout = self.shards(pad_value)
        q, k, v = (x.requires_grad_() for x in qkv)
        out, lse = ringray.ring_attention(q, k, v, return_lse=True, **self.arguments)
        out.backward(dout)
        assert q.grad is not None
        assert k.grad is not None
        assert v.grad is not None
        assert (out.dtype, q.grad.dtype, lse.dtype) == (self.dtype, self.dtype, torch.float32)
        return {"out": out.detach(), "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
