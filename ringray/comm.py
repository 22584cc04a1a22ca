"""Talking to the other ranks of a ring: one batch of sends and receives per hop, behind one object.

``connect(group)`` gives a ``Comm``; without a process group, or in a group of one, it is a null
ring through which the same code computes locally. All ranks post the same batches in the same
order: unbatched or differently ordered sends deadlock on NCCL.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Meter:
    """What one rank moved and how long it waited, since the meter was made.

    ``sent_bytes``: payload handed to the network. ``messages``: sends. ``wait_s``: seconds the host
    blocked for messages; on CUDA waiting happens on the device and is not seen here.
    """

    sent_bytes: int = 0
    messages: int = 0
    wait_s: float = 0.0

    def snapshot(self) -> Meter:
        """The counts so far."""
        return replace(self)

    def since(self, earlier: Meter) -> Meter:
        """What was counted after ``earlier`` was taken."""
        return Meter(
            self.sent_bytes - earlier.sent_bytes,
            self.messages - earlier.messages,
            self.wait_s - earlier.wait_s,
        )


@dataclass
class Batch:
    """Sends and receives of one hop, in an order that all ranks share."""

    operations: list[tuple[bool, Tensor, int]] = field(default_factory=list)

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous tensor to a rank; it must not change until the batch has ended."""
        assert tensor.is_contiguous()
        self.operations.append((True, tensor, to))

    def receive(self, tensor: Tensor, source: int) -> None:
        """Receive into a contiguous tensor from a rank."""
        assert tensor.is_contiguous()
        self.operations.append((False, tensor, source))


class Pending:
    """A posted batch. ``wait`` returns when its tensors may be used (on CUDA: by this stream)."""

    def __init__(self, works: list[dist.Work], batch: Batch, meter: Meter) -> None:
        self._works, self._batch, self._meter = works, batch, meter

    def wait(self) -> None:
        """Block until all sends and receives of the batch have ended."""
        began = time.perf_counter()
        for work in self._works:
            work.wait()
        self._meter.wait_s += time.perf_counter() - began
        self._works = []


class Comm:
    """The ranks of one ring, seen from one of them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self.meter = METER

    def post(self, batch: Batch) -> Pending:
        """Start all operations of a batch at once."""
        if not batch.operations:
            return Pending([], batch, self.meter)
        assert self._group is not None, "a null ring has nobody to talk to"
        operations = [
            dist.P2POp(
                dist.isend if is_send else dist.irecv,
                tensor,
                dist.get_global_rank(self._group, peer),
                self._group,
            )
            for is_send, tensor, peer in batch.operations
        ]
        for is_send, tensor, _ in batch.operations:
            if is_send:
                self.meter.sent_bytes += tensor.numel() * tensor.element_size()
                self.meter.messages += 1
        return Pending(dist.batch_isend_irecv(operations), batch, self.meter)

    def gather_integers(self, values: list[int], device: torch.device) -> list[list[int]]:
        """Every rank's ``values`` (the same count everywhere), by rank."""
        if self._group is None:
            return [values]
        on = device if dist.get_backend(self._group) == "nccl" else torch.device("cpu")
        mine = torch.tensor(values, dtype=torch.int64, device=on)
        return torch.stack(self.gather(mine)).tolist()

    def sum(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        if self._group is not None:
            dist.all_reduce(tensor, group=self._group)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor of one shape, by rank."""
        if self._group is None:
            return [tensor]
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor, group=self._group)
        return parts


METER = Meter()  # this process: one rank


def connect(group: dist.ProcessGroup | None) -> Comm:
    """The ring of ``group``; None means the default group if there is one, otherwise local."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group: got {type(group).__name__}, expected a process group or None")
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    return Comm(group)
